"""Blocked local attention that reads neighbourhoods from the map: nothing is gathered, no attention weight is stored.

A program holds up to 64 queries of one block and one head and goes through the (b + 2h)² keys of its neighbourhood in
chunks, with a running softmax. The maps are channels_last, so a pixel of a head is one run of memory.

The position's term of query m and key n is A[m, row of n] + C[m, column of n], where A[m, r] = q_m · rel_rows[r - row
of m]: A and C are made once for a tile of queries, by a product with the whole table and a shift of each line, and
spread over the keys by products with matrices of zeros and ones. In the backward pass such matrices collect gradients.

Gradients of keys and values are sums over the blocks that read them, added up in float32 by atomic additions; their
order, and so their last bits, can differ from run to run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..halo import check_halo, halo_attention
from . import INTERPRETED, TYPES, power_of_two, why_not_here

QUERIES = 64  # a program's
KEYS = 64  # at once
MOST_CHANNELS = 256  # of a head
MOST_WINDOW = 64
SLOTS = 64  # copies of the tables' gradients, so that programs seldom add to one place at once


@triton.jit
def _places(
    down,
    across,
    heads,
    query_height,
    query_width,
    SIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    QUERIES: tl.constexpr,
    tile,
):
    """Batch, head, block row and column of this program; row and column of its queries in block and map."""
    program = tl.program_id(0)
    block_col = program % across
    block_row = (program // across) % down
    head = (program // (across * down)) % heads
    batch = program // (across * down * heads)
    m = tile * QUERIES + tl.arange(0, QUERIES)
    i = m // SIDE
    j = m % SIDE
    row = block_row * SIDE + i
    col = block_col * SIDE + j
    inside = (m < SIDE * SIDE) & (row < query_height) & (col < query_width)
    pixel = (batch.to(tl.int64) * query_height + row) * query_width + col
    return batch, head, block_row, block_col, i * STRIDE, j * STRIDE, inside, pixel


@triton.jit
def _spread(
    q, table_ptr, offset, position_scale,
    channels: tl.constexpr, WINDOW: tl.constexpr, HALO: tl.constexpr,
    TABLE: tl.constexpr, WINDOWS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """[QUERIES, WINDOWS]: the position's term of each query for every row (or column) of its neighbourhood."""
    t = tl.arange(0, TABLE)
    c = tl.arange(0, CHANNELS)
    mask = (c < channels)[:, None] & (t < 2 * WINDOW - 1)[None, :]
    table = tl.load(table_ptr + t[None, :] * channels + c[:, None], mask=mask, other=0.0)
    logits = tl.dot(q.to(DOT), table.to(DOT), input_precision="ieee", out_dtype=ACC) * position_scale
    w = tl.arange(0, WINDOWS)
    index = w[None, :] - HALO - offset[:, None] + WINDOW - 1
    return tl.gather(logits, tl.minimum(tl.maximum(index, 0), TABLE - 1), 1)


@triton.jit
def _keys(
    start, batch, head, block_row, block_col, row_offset, col_offset, heads, height, width,
    BLOCK: tl.constexpr, HALO: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr,
    CENTERED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Of a chunk of keys: row and column in the window, pixel, whether it is inside the map, and who may see it."""
    n = start + tl.arange(0, KEYS)
    r = n // WINDOW
    c = n % WINDOW
    y = block_row * BLOCK - HALO + r
    x = block_col * BLOCK - HALO + c
    valid = n < WINDOW * WINDOW
    inside = valid & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    pixel = (batch.to(tl.int64) * height + y) * width + x
    seen = inside if MASKED else valid
    allowed = (row_offset[:, None] >= 0) & seen[None, :]
    if CENTERED:
        below = r[None, :] - HALO - row_offset[:, None]
        beside = c[None, :] - HALO - col_offset[:, None]
        allowed = allowed & (below <= HALO) & (below >= -HALO) & (beside <= HALO) & (beside >= -HALO)
    return r, c, pixel, inside, allowed


@triton.jit
def _logits(
    q, k, of_rows, of_cols, r, c, allowed, scale,
    RELATIVE: tl.constexpr, WINDOWS: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    s = tl.dot(q.to(DOT), tl.trans(k.to(DOT)), input_precision="ieee", out_dtype=ACC) * scale
    if RELATIVE:
        w = tl.arange(0, WINDOWS)
        s += tl.dot(of_rows, (w[:, None] == r[None, :]).to(ACC), input_precision=PRECISION, out_dtype=ACC)
        s += tl.dot(of_cols, (w[:, None] == c[None, :]).to(ACC), input_precision=PRECISION, out_dtype=ACC)
    return tl.where(allowed, s, float("-inf"))


@triton.jit
def _forward_kernel(
    q_ptr,  # [batch, query_height, query_width, heads channels]
    k_ptr,  # [batch, height, width, heads channels]
    v_ptr,  # [batch, height, width, heads value_channels]
    rows_ptr,  # [2 WINDOW - 1, channels]: zero for the second half of the channels
    cols_ptr,  # [2 WINDOW - 1, channels]: zero for the first half
    output_ptr,  # [batch, query_height, query_width, heads value_channels]
    lse_ptr,  # [batch, query_height, query_width, heads]: logarithm of the sum of exponentials
    height, width, query_height, query_width, down, across, heads, scale, position_scale,
    channels: tl.constexpr, value_channels: tl.constexpr,
    BLOCK: tl.constexpr, HALO: tl.constexpr, WINDOW: tl.constexpr, STRIDE: tl.constexpr, SIDE: tl.constexpr,
    CENTERED: tl.constexpr, MASKED: tl.constexpr, RELATIVE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, VALUES: tl.constexpr,
    TABLE: tl.constexpr, WINDOWS: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    batch, head, block_row, block_col, row_offset, col_offset, inside, pixel = _places(
        down, across, heads, query_height, query_width, SIDE, STRIDE, QUERIES, tl.program_id(1)
    )
    c = tl.arange(0, CHANNELS)
    e = tl.arange(0, VALUES)
    places = (pixel * heads + head)[:, None] * channels + c[None, :]
    q = tl.load(q_ptr + places, mask=inside[:, None] & (c < channels)[None, :], other=0.0)
    of_rows = tl.zeros([QUERIES, WINDOWS], ACC)
    of_cols = tl.zeros([QUERIES, WINDOWS], ACC)
    if RELATIVE:
        of_rows = _spread(
            q, rows_ptr, row_offset, position_scale, channels, WINDOW, HALO, TABLE, WINDOWS, CHANNELS, ACC, DOT
        )
        of_cols = _spread(
            q, cols_ptr, col_offset, position_scale, channels, WINDOW, HALO, TABLE, WINDOWS, CHANNELS, ACC, DOT
        )
    largest = tl.full([QUERIES], float("-inf"), ACC)
    total = tl.zeros([QUERIES], ACC)
    output = tl.zeros([QUERIES, VALUES], ACC)
    for start in range(0, WINDOW * WINDOW, KEYS):
        r, col, key_pixel, key_inside, allowed = _keys(
            start, batch, head, block_row, block_col, row_offset, col_offset, heads, height, width,
            BLOCK, HALO, WINDOW, KEYS, CENTERED, MASKED,
        )  # fmt: skip
        at = (key_pixel * heads + head)[:, None]
        k = tl.load(k_ptr + at * channels + c[None, :], mask=key_inside[:, None] & (c < channels)[None, :], other=0.0)
        s = _logits(q, k, of_rows, of_cols, r, col, allowed, scale, RELATIVE, WINDOWS, ACC, DOT, PRECISION)
        larger = tl.maximum(largest, tl.max(s, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        p = tl.exp(s - base[:, None])
        shrink = tl.exp(largest - base)
        total = total * shrink + tl.sum(p, 1)
        values = key_inside[:, None] & (e < value_channels)[None, :]
        v = tl.load(v_ptr + at * value_channels + e[None, :], mask=values, other=0.0)
        output = output * shrink[:, None] + tl.dot(p.to(DOT), v.to(DOT), input_precision="ieee", out_dtype=ACC)
        largest = larger
    total = tl.where(total == 0, 1.0, total)  # queries that only fill up a tile
    output = output / total[:, None]
    places = (pixel * heads + head)[:, None] * value_channels + e[None, :]
    mask = inside[:, None] & (e < value_channels)[None, :]
    tl.store(output_ptr + places, output.to(output_ptr.dtype.element_ty), mask=mask)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(lse_ptr + pixel * heads + head, base + tl.log(total), mask=inside)


@triton.jit
def _query_gradients_kernel(
    q_ptr, k_ptr, v_ptr, rows_ptr, cols_ptr, output_ptr, lse_ptr,  # as in the forward kernel
    grad_ptr,  # of the output
    grad_q_ptr,
    grad_rows_ptr,  # [slots, 2 WINDOW - 1, channels]
    grad_cols_ptr,  # [slots, 2 WINDOW - 1, channels]
    height, width, query_height, query_width, down, across, heads, slots, scale, position_scale,
    channels: tl.constexpr, value_channels: tl.constexpr,
    BLOCK: tl.constexpr, HALO: tl.constexpr, WINDOW: tl.constexpr, STRIDE: tl.constexpr, SIDE: tl.constexpr,
    CENTERED: tl.constexpr, MASKED: tl.constexpr, RELATIVE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, VALUES: tl.constexpr,
    TABLE: tl.constexpr, WINDOWS: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    batch, head, block_row, block_col, row_offset, col_offset, inside, pixel = _places(
        down, across, heads, query_height, query_width, SIDE, STRIDE, QUERIES, tl.program_id(1)
    )
    c = tl.arange(0, CHANNELS)
    e = tl.arange(0, VALUES)
    mask = inside[:, None] & (c < channels)[None, :]
    places = (pixel * heads + head)[:, None] * channels + c[None, :]
    q = tl.load(q_ptr + places, mask=mask, other=0.0)
    of_rows = tl.zeros([QUERIES, WINDOWS], ACC)
    of_cols = tl.zeros([QUERIES, WINDOWS], ACC)
    if RELATIVE:
        of_rows = _spread(
            q, rows_ptr, row_offset, position_scale, channels, WINDOW, HALO, TABLE, WINDOWS, CHANNELS, ACC, DOT
        )
        of_cols = _spread(
            q, cols_ptr, col_offset, position_scale, channels, WINDOW, HALO, TABLE, WINDOWS, CHANNELS, ACC, DOT
        )
    of_values = inside[:, None] & (e < value_channels)[None, :]
    value_places = (pixel * heads + head)[:, None] * value_channels + e[None, :]
    grad = tl.load(grad_ptr + value_places, mask=of_values, other=0.0)
    output = tl.load(output_ptr + value_places, mask=of_values, other=0.0)
    delta = tl.sum(grad.to(ACC) * output.to(ACC), 1)
    lse = tl.load(lse_ptr + pixel * heads + head, mask=inside, other=0.0)
    grad_q = tl.zeros([QUERIES, CHANNELS], ACC)
    by_row = tl.zeros([QUERIES, WINDOWS], ACC)
    by_col = tl.zeros([QUERIES, WINDOWS], ACC)
    w = tl.arange(0, WINDOWS)
    for start in range(0, WINDOW * WINDOW, KEYS):
        r, col, key_pixel, key_inside, allowed = _keys(
            start, batch, head, block_row, block_col, row_offset, col_offset, heads, height, width,
            BLOCK, HALO, WINDOW, KEYS, CENTERED, MASKED,
        )  # fmt: skip
        at = (key_pixel * heads + head)[:, None]
        k = tl.load(k_ptr + at * channels + c[None, :], mask=key_inside[:, None] & (c < channels)[None, :], other=0.0)
        values = key_inside[:, None] & (e < value_channels)[None, :]
        v = tl.load(v_ptr + at * value_channels + e[None, :], mask=values, other=0.0)
        s = _logits(q, k, of_rows, of_cols, r, col, allowed, scale, RELATIVE, WINDOWS, ACC, DOT, PRECISION)
        p = tl.exp(s - lse[:, None])
        grad_p = tl.dot(grad.to(DOT), tl.trans(v.to(DOT)), input_precision="ieee", out_dtype=ACC)
        grad_s = p * (grad_p - delta[:, None])
        grad_q += tl.dot(grad_s.to(DOT), k.to(DOT), input_precision="ieee", out_dtype=ACC) * scale
        if RELATIVE:
            by_row += tl.dot(grad_s, (r[:, None] == w[None, :]).to(ACC), input_precision=PRECISION, out_dtype=ACC)
            by_col += tl.dot(grad_s, (col[:, None] == w[None, :]).to(ACC), input_precision=PRECISION, out_dtype=ACC)
    if RELATIVE:
        t = tl.arange(0, TABLE)
        of_table = (t < 2 * WINDOW - 1)[:, None] & (c < channels)[None, :]
        slot = (tl.program_id(0) % slots) * (2 * WINDOW - 1) * channels
        entries = t[:, None] * channels + c[None, :]
        # back from rows of the window to entries of the table: the shift of each line undone
        place = t[None, :] - (WINDOW - 1) + HALO + row_offset[:, None]
        there = (place >= 0) & (place < WINDOW)
        of_entry = tl.gather(by_row, tl.minimum(tl.maximum(place, 0), WINDOWS - 1), 1)
        of_entry = tl.where(there, of_entry, 0.0) * position_scale
        table = tl.load(rows_ptr + entries, mask=of_table, other=0.0)
        grad_q += tl.dot(of_entry.to(DOT), table.to(DOT), input_precision="ieee", out_dtype=ACC)
        collected = tl.dot(tl.trans(of_entry.to(DOT)), q.to(DOT), input_precision="ieee", out_dtype=ACC)
        tl.atomic_add(grad_rows_ptr + slot + entries, collected, mask=of_table)
        place = t[None, :] - (WINDOW - 1) + HALO + col_offset[:, None]
        there = (place >= 0) & (place < WINDOW)
        of_entry = tl.gather(by_col, tl.minimum(tl.maximum(place, 0), WINDOWS - 1), 1)
        of_entry = tl.where(there, of_entry, 0.0) * position_scale
        table = tl.load(cols_ptr + entries, mask=of_table, other=0.0)
        grad_q += tl.dot(of_entry.to(DOT), table.to(DOT), input_precision="ieee", out_dtype=ACC)
        collected = tl.dot(tl.trans(of_entry.to(DOT)), q.to(DOT), input_precision="ieee", out_dtype=ACC)
        tl.atomic_add(grad_cols_ptr + slot + entries, collected, mask=of_table)
    tl.store(grad_q_ptr + places, grad_q.to(grad_q_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _key_gradients_kernel(
    q_ptr, k_ptr, v_ptr, rows_ptr, cols_ptr, output_ptr, lse_ptr, grad_ptr,  # as above
    grad_k_ptr,  # [batch, height, width, heads channels], float32
    grad_v_ptr,  # [batch, height, width, heads value_channels], float32
    height, width, query_height, query_width, down, across, heads, scale, position_scale,
    channels: tl.constexpr, value_channels: tl.constexpr,
    BLOCK: tl.constexpr, HALO: tl.constexpr, WINDOW: tl.constexpr, STRIDE: tl.constexpr, SIDE: tl.constexpr,
    CENTERED: tl.constexpr, MASKED: tl.constexpr, RELATIVE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, VALUES: tl.constexpr,
    TABLE: tl.constexpr, WINDOWS: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, CHANNELS)
    e = tl.arange(0, VALUES)
    grad_k = tl.zeros([KEYS, CHANNELS], ACC)
    grad_v = tl.zeros([KEYS, VALUES], ACC)
    start = tl.program_id(1) * KEYS
    for tile in range(0, (SIDE * SIDE + QUERIES - 1) // QUERIES):
        batch, head, block_row, block_col, row_offset, col_offset, inside, pixel = _places(
            down, across, heads, query_height, query_width, SIDE, STRIDE, QUERIES, tile
        )
        r, col, key_pixel, key_inside, allowed = _keys(
            start, batch, head, block_row, block_col, row_offset, col_offset, heads, height, width,
            BLOCK, HALO, WINDOW, KEYS, CENTERED, MASKED,
        )  # fmt: skip
        at = (key_pixel * heads + head)[:, None]
        k = tl.load(k_ptr + at * channels + c[None, :], mask=key_inside[:, None] & (c < channels)[None, :], other=0.0)
        values = key_inside[:, None] & (e < value_channels)[None, :]
        v = tl.load(v_ptr + at * value_channels + e[None, :], mask=values, other=0.0)
        places = (pixel * heads + head)[:, None] * channels + c[None, :]
        q = tl.load(q_ptr + places, mask=inside[:, None] & (c < channels)[None, :], other=0.0)
        of_rows = tl.zeros([QUERIES, WINDOWS], ACC)
        of_cols = tl.zeros([QUERIES, WINDOWS], ACC)
        if RELATIVE:
            of_rows = _spread(
                q, rows_ptr, row_offset, position_scale, channels, WINDOW, HALO, TABLE, WINDOWS, CHANNELS, ACC, DOT
            )
            of_cols = _spread(
                q, cols_ptr, col_offset, position_scale, channels, WINDOW, HALO, TABLE, WINDOWS, CHANNELS, ACC, DOT
            )
        of_values = inside[:, None] & (e < value_channels)[None, :]
        value_places = (pixel * heads + head)[:, None] * value_channels + e[None, :]
        grad = tl.load(grad_ptr + value_places, mask=of_values, other=0.0)
        output = tl.load(output_ptr + value_places, mask=of_values, other=0.0)
        delta = tl.sum(grad.to(ACC) * output.to(ACC), 1)
        lse = tl.load(lse_ptr + pixel * heads + head, mask=inside, other=0.0)
        s = _logits(q, k, of_rows, of_cols, r, col, allowed, scale, RELATIVE, WINDOWS, ACC, DOT, PRECISION)
        p = tl.where(inside[:, None], tl.exp(s - lse[:, None]), 0.0)
        grad_v += tl.dot(tl.trans(p.to(DOT)), grad.to(DOT), input_precision="ieee", out_dtype=ACC)
        grad_p = tl.dot(grad.to(DOT), tl.trans(v.to(DOT)), input_precision="ieee", out_dtype=ACC)
        grad_s = p * (grad_p - delta[:, None])
        grad_k += tl.dot(tl.trans(grad_s.to(DOT)), q.to(DOT), input_precision="ieee", out_dtype=ACC) * scale
    program = tl.program_id(0)
    head = (program // (across * down)) % heads
    batch = program // (across * down * heads)
    n = start + tl.arange(0, KEYS)
    y = ((program // across) % down) * BLOCK - HALO + n // WINDOW
    x = (program % across) * BLOCK - HALO + n % WINDOW
    inside = (n < WINDOW * WINDOW) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    at = (((batch.to(tl.int64) * height + y) * width + x) * heads + head)[:, None]
    mask = inside[:, None] & (c < channels)[None, :]
    tl.atomic_add(grad_k_ptr + at * channels + c[None, :], grad_k, mask=mask)
    mask = inside[:, None] & (e < value_channels)[None, :]
    tl.atomic_add(grad_v_ptr + at * value_channels + e[None, :], grad_v, mask=mask)


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, heads: int, block: int, halo: int, stride: int, flags: tuple[bool, bool, bool]
) -> tuple[list[int], dict[str, Any], tuple[int, int, int]]:
    """Sizes and constants of all three kernels; programs, tiles of queries and chunks of keys."""
    batch, _, height, width = k.shape
    channels, value_channels = k.shape[1] // heads, v.shape[1] // heads
    window, side = block + 2 * halo, block // stride
    down, across = triton.cdiv(height, block), triton.cdiv(width, block)
    accumulate = tl.float64 if q.dtype == torch.float64 else tl.float32
    centered, masked, relative = flags
    constants = {
        "channels": channels,
        "value_channels": value_channels,
        "BLOCK": block,
        "HALO": halo,
        "WINDOW": window,
        "STRIDE": stride,
        "SIDE": side,
        "CENTERED": centered,
        "MASKED": masked,
        "RELATIVE": relative,
        "QUERIES": power_of_two(side * side, least=16, most=QUERIES),
        "KEYS": KEYS,
        "CHANNELS": power_of_two(channels, least=16, most=MOST_CHANNELS),
        "VALUES": power_of_two(value_channels, least=16, most=MOST_CHANNELS),
        "TABLE": power_of_two(2 * window - 1, least=16, most=2 * MOST_WINDOW),
        "WINDOWS": power_of_two(window, least=16, most=MOST_WINDOW),
        "ACC": accumulate,
        "DOT": accumulate if INTERPRETED else TYPES[q.dtype],  # the interpreter knows no products of bfloat16
        "PRECISION": "ieee" if q.dtype.itemsize > 2 else "tf32",
    }
    sizes = [height, width, q.shape[2], q.shape[3], down, across, heads]
    tiles = triton.cdiv(side * side, constants["QUERIES"])
    return sizes, constants, (batch * heads * down * across, tiles, triton.cdiv(window * window, KEYS))


class _HaloAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rel_rows: Tensor | None,
        rel_cols: Tensor | None,
        shape: tuple[int, int, int, int],
        flags: tuple[bool, bool],
        scales: tuple[float, float],
    ) -> Tensor:
        heads, block, halo, stride = shape
        relative = rel_rows is not None
        sizes, constants, (programs, tiles, _chunks) = _arguments(
            q, k, v, heads, block, halo, stride, (*flags, relative)
        )
        rows, cols = _full_tables(rel_rows, rel_cols, q)
        output = torch.empty(
            (q.shape[0], v.shape[1], *q.shape[2:]), device=q.device, dtype=v.dtype, memory_format=torch.channels_last
        )
        acc = torch.promote_types(q.dtype, torch.float32)
        lse = torch.empty((q.shape[0], *q.shape[2:], heads), device=q.device, dtype=acc)
        _forward_kernel[(programs, tiles)](q, k, v, rows, cols, output, lse, *sizes, *scales, **constants)
        ctx.save_for_backward(q, k, v, rows, cols, output, lse)
        ctx.relative = None if rel_rows is None or rel_cols is None else (rel_rows.dtype, rel_cols.dtype)
        ctx.shape, ctx.flags, ctx.scales = shape, flags, scales
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        q, k, v, rows, cols, output, lse = ctx.saved_tensors
        heads, block, halo, stride = ctx.shape
        flags = (*ctx.flags, ctx.relative is not None)
        sizes, constants, (programs, tiles, chunks) = _arguments(q, k, v, heads, block, halo, stride, flags)
        grad = grad.to(output.dtype).contiguous(memory_format=torch.channels_last)
        grad_q = torch.empty_like(q)
        slots = min(SLOTS, programs)
        grad_rows, grad_cols = (lse.new_zeros((slots, *rows.shape)) for _ in range(2))
        _query_gradients_kernel[(programs, tiles)](
            q,
            k,
            v,
            rows,
            cols,
            output,
            lse,
            grad,
            grad_q,
            grad_rows,
            grad_cols,
            *sizes,
            slots,
            *ctx.scales,
            **constants,
        )
        grad_k, grad_v = (torch.zeros_like(t, dtype=lse.dtype) for t in (k, v))
        _key_gradients_kernel[(programs, chunks)](
            q, k, v, rows, cols, output, lse, grad, grad_k, grad_v, *sizes, *ctx.scales, **constants
        )
        of_tables: list[Tensor | None] = [None, None]
        if ctx.relative is not None:
            half = rows.shape[1] // 2
            of_tables = [grad_rows.sum(0)[:, :half].to(ctx.relative[0]), grad_cols.sum(0)[:, half:].to(ctx.relative[1])]
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), *of_tables, None, None, None


def _full_tables(rel_rows: Tensor | None, rel_cols: Tensor | None, q: Tensor) -> tuple[Tensor, Tensor]:
    """Both tables over all channels of a query: zero where the other one is read. Anything where there are none."""
    if rel_rows is None or rel_cols is None:
        return q.new_zeros(1, 2), q.new_zeros(1, 2)
    half = rel_rows.shape[1]
    rows = torch.nn.functional.pad(rel_rows.detach().to(q.dtype), (0, half))
    cols = torch.nn.functional.pad(rel_cols.detach().to(q.dtype), (half, 0))
    return rows.contiguous(), cols.contiguous()


def _objection(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel_rows: Tensor | None,
    rel_cols: Tensor | None,
    *,
    heads: int,
    block: int,
    halo: int,
    stride: int = 1,
    **options: Any,
) -> str | None:
    if any(not map_.is_contiguous(memory_format=torch.channels_last) for map_ in (q, k, v)):
        return "the maps must be channels_last"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in TYPES:
        return f"the maps must be of one floating-point type, got {q.dtype}, {k.dtype} and {v.dtype}"
    if stride < 1 or block % stride:
        return f"expected a block divisible by the stride {stride}, got {block}"
    if block + 2 * halo > MOST_WINDOW:
        return f"the neighbourhood must be at most {MOST_WINDOW} pixels wide, got {block + 2 * halo}"
    if max(k.shape[1], v.shape[1]) > MOST_CHANNELS * heads:
        return f"a head must have at most {MOST_CHANNELS} channels"
    return why_not_here(q)


@halo_attention.kernel("triton", _objection)
def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel_rows: Tensor | None,
    rel_cols: Tensor | None,
    *,
    heads: int,
    block: int,
    halo: int,
    stride: int = 1,
    centered: bool = False,
    mask_padding: bool = True,
    scale: float | None = None,
    position_scale: float | None = None,
) -> Tensor:
    check_halo(q, k, v, rel_rows, rel_cols, heads=heads, block=block, halo=halo, stride=stride)
    scale = (q.shape[1] // heads) ** -0.5 if scale is None else scale
    scales = (scale, scale if position_scale is None else position_scale)
    shape = (heads, block, halo, stride)
    with torch.cuda.device_of(q):
        return _HaloAttention.apply(q, k, v, rel_rows, rel_cols, shape, (centered, mask_padding), scales)
