"""Blocked local attention that reads neighborhoods directly from the map and stores no attention weights.

A program holds a tile of queries of one block and one head and iterates over the (b + 2h)² keys of its neighborhood in
chunks. If padding is masked, keys outside the map are skipped. The maps are channels_last, so the channels of a pixel
and a head are contiguous.

The position term of query m and key n is A[m, row of n] + A[m, W + column of n], where A[m, r] = q_m · rel_rows[r -
row of m], and the entries of the columns follow those of the W rows. A is computed once for a tile of queries, by a
product with both tables and a shift of each row, and expanded to the keys by a product with M[n, ·], which is one at
n's row and at n's column and zero elsewhere. In the backward pass, the same product accumulates the gradient of A.

The softmax is computed in base 2: exp(x) = 2^(x log2 e), and `lse` is the base-2 logarithm of the sum. The backward
pass recomputes the transposed weights, so that the gradients of keys and values need no further transposition. These
gradients are sums over the blocks that read a pixel, accumulated in float32 by atomic additions. The order of the
additions, and therefore the last bits, can differ between runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..halo_attention import HaloPlan
from .runtime import (
    LAUNCHES,
    LOG2_E,
    SLOTS,
    TYPES,
    Launch,
    Operator,
    device_unsupported_reason,
    head_tile,
    pieces,
    power_of_2,
    product,
    run_attention,
    tile,
)

MOST_CHANNELS = 256  # channels of a head
MOST_WINDOW = 64
MOST_TABLE_BYTES = 64 * 1024  # of both tables together, which a program holds at once
# If n d < RECIPROCAL, n // d equals n (RECIPROCAL // d + 1) // RECIPROCAL, a product and a shift without a division.
RECIPROCAL = tl.constexpr(1 << 20)


def _forward_launches(queries: int, channels: int) -> tuple[Launch, ...]:
    """Returns the fastest launch parameters on an H200, for blocks of 8, 10 and 12 and heads of 16 to 256 channels."""
    if queries <= 64:
        return (Launch(64, 32, 2, 3), *LAUNCHES) if channels <= 64 else LAUNCHES
    if channels > 128:
        return Launch(128, 64, 8, 3), *LAUNCHES
    if queries <= 128:
        return Launch(128, 32, 4, 3), *LAUNCHES
    return Launch(64, 64, 4, 3) if channels <= 64 else Launch(64, 32, 4, 3), *LAUNCHES


def _backward_launches(queries: int, channels: int) -> tuple[Launch, ...]:
    if queries > 64 and channels > 128:
        return Launch(128, 32, 8, 2), *LAUNCHES
    return LAUNCHES if queries > 64 and channels > 64 else (Launch(64, 64, 4, 3), *LAUNCHES)


@triton.jit
def _block_of_program(down, across, heads):
    """Returns batch, head, block row and block column. Heads vary fastest, because they share cache lines."""
    program = tl.program_id(0)
    block = program // heads
    batch = block // (across * down)
    return batch.to(tl.int64), program % heads, (block // across) % down, block % across


@triton.jit
def _queries(
    batch, block_row, block_col, height, width, SIDE: tl.constexpr, STRIDE: tl.constexpr, QUERIES: tl.constexpr
):
    """Returns for each query of a tile its row and column in the block, whether it is inside the map, and its pixel."""
    m = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    row = block_row * SIDE + m // SIDE
    col = block_col * SIDE + m % SIDE
    inside = (m < SIDE * SIDE) & (row < height) & (col < width)
    return (m // SIDE) * STRIDE, (m % SIDE) * STRIDE, inside, (batch * height + row) * width + col


@triton.jit
def _extent(block, size, BLOCK: tl.constexpr, HALO: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr):
    """Returns the first visible row or column of a window, and their number: those inside the map if MASKED."""
    if not MASKED:
        return 0, WINDOW
    first = tl.maximum(HALO - block * BLOCK, 0)
    return first, tl.minimum(size + HALO - block * BLOCK, WINDOW) - first


@triton.jit
def _keys(
    start, batch, block_row, block_col, height, width, first_row, rows, first_col, cols,
    BLOCK: tl.constexpr, HALO: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Returns for each key of a chunk its row and column in the window, visibility, presence in the map, and pixel.

    With WHOLE, the keys of a row are those of the whole window, and those outside of the map are invisible.
    """
    n = start + tl.arange(0, KEYS)
    if WHOLE:
        quotient = n // WINDOW
        row, col = first_row + quotient, n - quotient * WINDOW
        seen = (n < rows * WINDOW) & (col >= first_col) & (col < first_col + cols)
    else:
        quotient = (n * (RECIPROCAL // cols + 1)) // RECIPROCAL
        row, col = first_row + quotient, first_col + n - quotient * cols
        seen = n < rows * cols
    y = block_row * BLOCK - HALO + row
    x = block_col * BLOCK - HALO + col
    inside = seen
    if not MASKED:
        inside = seen & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    return row, col, seen, inside, (batch * height + y) * width + x


@triton.jit
def _near(row, col, row_offset, col_offset, HALO: tl.constexpr):
    """Returns whether keys are at most HALO pixels from queries in both directions."""
    below = row - HALO - row_offset
    beside = col - HALO - col_offset
    return (below <= HALO) & (below >= -HALO) & (beside <= HALO) & (beside >= -HALO)


@triton.jit
def _load(ptr, pixel, inside, head, heads, channels: tl.constexpr, CHANNELS: tl.constexpr):
    """Loads the channels of a head for each pixel, [pixels, CHANNELS], with zeros outside the map."""
    c = tl.arange(0, CHANNELS)
    mask = inside[:, None] & (c < channels)[None, :]
    return tl.load(ptr + (pixel * heads + head)[:, None] * channels + c[None, :], mask=mask, other=0.0)


@triton.jit
def _table_entries(half: tl.constexpr, WINDOW: tl.constexpr, TABLE: tl.constexpr, CHANNELS: tl.constexpr):
    """Returns offset and mask of the entries of [2 TABLE, CHANNELS] in the table of rows, and in the table of columns.

    The table of rows belongs to the first half of a query's channels. The table of columns follows after TABLE rows and
    belongs to the second half.
    """
    t = tl.arange(0, 2 * TABLE)[:, None]
    c = tl.arange(0, CHANNELS)[None, :]
    row_mask = (t < 2 * WINDOW - 1) & (c < half)
    col_mask = (t >= TABLE) & (t < TABLE + 2 * WINDOW - 1) & (c >= half) & (c < 2 * half)
    return t * half + c, row_mask, (t - TABLE) * half + c - half, col_mask


@triton.jit
def _load_tables(
    rows_ptr, cols_ptr, half: tl.constexpr, WINDOW: tl.constexpr, TABLE: tl.constexpr, CHANNELS: tl.constexpr
):
    row_places, row_mask, col_places, col_mask = _table_entries(half, WINDOW, TABLE, CHANNELS)
    rows = tl.load(rows_ptr + row_places, mask=row_mask, other=0.0)
    return rows + tl.load(cols_ptr + col_places, mask=col_mask, other=0.0)


@triton.jit
def _position_products(
    q, tables, row_offset, col_offset,
    HALO: tl.constexpr, WINDOW: tl.constexpr, TABLE: tl.constexpr, WINDOWS: tl.constexpr,
    ACC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Computes A, [QUERIES, 2 WINDOWS]: the product of each query with the entry of each visible row and column."""
    w = tl.arange(0, 2 * WINDOWS)[None, :]
    is_col = w >= WINDOWS
    offset = tl.where(is_col, col_offset[:, None], row_offset[:, None])
    entry = tl.where(is_col, w - WINDOWS, w) - HALO - offset + WINDOW - 1
    entry = tl.minimum(tl.maximum(entry, 0), TABLE - 1) + tl.where(is_col, TABLE, 0)
    return tl.gather(product(q, tl.trans(tables), ACC, DOT), entry, 1)


@triton.jit
def _to_entries(
    grad_places, row_offset, col_offset,
    HALO: tl.constexpr, WINDOW: tl.constexpr, TABLE: tl.constexpr, WINDOWS: tl.constexpr,
):  # fmt: skip
    """Undoes the shift of each row of the gradient of A: [QUERIES, 2 WINDOWS] -> [QUERIES, 2 TABLE]."""
    t = tl.arange(0, 2 * TABLE)[None, :]
    is_col = t >= TABLE
    offset = tl.where(is_col, col_offset[:, None], row_offset[:, None])
    place = tl.where(is_col, t - TABLE, t) - (WINDOW - 1) + HALO + offset
    inside = (place >= 0) & (place < WINDOW)
    place = tl.minimum(tl.maximum(place, 0), WINDOWS - 1) + tl.where(is_col, WINDOWS, 0)
    return tl.where(inside, tl.gather(grad_places, place, 1), 0.0)


@triton.jit
def _marks(row, col, WINDOWS: tl.constexpr, DOT: tl.constexpr):
    """Computes M, [KEYS, 2 WINDOWS], which is one at the row and the column of each key."""
    w = tl.arange(0, 2 * WINDOWS)[None, :]
    return ((w == row[:, None]) | (w == col[:, None] + WINDOWS)).to(DOT)


@triton.jit
def _forward_kernel(
    q_ptr,  # [batch, query_height, query_width, heads channels]
    k_ptr,  # [batch, height, width, heads channels]
    v_ptr,  # [batch, height, width, heads value_channels]
    rows_ptr,  # [2 WINDOW - 1, channels / 2]
    cols_ptr,  # [2 WINDOW - 1, channels / 2]
    output_ptr,  # [batch, query_height, query_width, heads value_channels]
    lse_ptr,  # [batch, query_height, query_width, heads]
    height, width, query_height, query_width, down, across, heads, scale, position_ratio,
    channels: tl.constexpr, value_channels: tl.constexpr,
    BLOCK: tl.constexpr, HALO: tl.constexpr, WINDOW: tl.constexpr, STRIDE: tl.constexpr, SIDE: tl.constexpr,
    CENTERED: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr, RELATIVE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, VALUES: tl.constexpr,
    TABLE: tl.constexpr, WINDOWS: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    batch, head, block_row, block_col = _block_of_program(down, across, heads)
    row_offset, col_offset, inside, pixel = _queries(
        batch, block_row, block_col, query_height, query_width, SIDE, STRIDE, QUERIES
    )
    q = _load(q_ptr, pixel, inside, head, heads, channels, CHANNELS)
    if RELATIVE:
        tables = _load_tables(rows_ptr, cols_ptr, channels // 2, WINDOW, TABLE, CHANNELS)
        positions = _position_products(q, tables, row_offset, col_offset, HALO, WINDOW, TABLE, WINDOWS, ACC, DOT)
        positions = (positions * position_ratio).to(DOT)
    largest = tl.full([QUERIES], float("-inf"), ACC)
    total = tl.zeros([QUERIES], ACC)
    output = tl.zeros([QUERIES, VALUES], ACC)
    first_row, rows = _extent(block_row, height, BLOCK, HALO, WINDOW, MASKED)
    first_col, cols = _extent(block_col, width, BLOCK, HALO, WINDOW, MASKED)
    line = WINDOW if WHOLE else cols
    for start in range(0, rows * line, KEYS):
        row, col, seen, key_inside, key_pixel = _keys(
            start, batch, block_row, block_col, height, width, first_row, rows, first_col, cols,
            BLOCK, HALO, WINDOW, MASKED, WHOLE, KEYS,
        )  # fmt: skip
        k = _load(k_ptr, key_pixel, key_inside, head, heads, channels, CHANNELS)
        s = product(q, tl.trans(k), ACC, DOT)
        if RELATIVE:
            s += product(positions, tl.trans(_marks(row, col, WINDOWS, DOT)), ACC, DOT)
        seen = seen[None, :]
        if CENTERED:
            seen = seen & _near(row[None, :], col[None, :], row_offset[:, None], col_offset[:, None], HALO)
        s = tl.where(seen, s * (scale * LOG2_E), float("-inf"))
        larger = tl.maximum(largest, tl.max(s, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(p, 1)
        v = _load(v_ptr, key_pixel, key_inside, head, heads, value_channels, VALUES)
        output = output * shrink[:, None] + product(p, v, ACC, DOT)
        largest = larger
    total = tl.where(total == 0, 1.0, total)  # padding queries have no keys
    e = tl.arange(0, VALUES)
    places = (pixel * heads + head)[:, None] * value_channels + e[None, :]
    mask = inside[:, None] & (e < value_channels)[None, :]
    tl.store(output_ptr + places, (output / total[:, None]).to(output_ptr.dtype.element_ty), mask=mask)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(lse_ptr + pixel * heads + head, base + tl.log2(total), mask=inside)


@triton.jit
def _backward_kernel(
    q_ptr, k_ptr, v_ptr, rows_ptr, cols_ptr, output_ptr, lse_ptr,  # as in the forward kernel
    grad_ptr,  # gradient of the output
    grad_q_ptr,
    grad_k_ptr,  # [batch, height, width, heads channels], float32
    grad_v_ptr,  # [batch, height, width, heads value_channels], float32
    grad_rows_ptr,  # [SLOTS, 2 WINDOW - 1, channels / 2], float32
    grad_cols_ptr,  # [SLOTS, 2 WINDOW - 1, channels / 2], float32
    height, width, query_height, query_width, down, across, heads, scale, position_ratio,
    channels: tl.constexpr, value_channels: tl.constexpr,
    BLOCK: tl.constexpr, HALO: tl.constexpr, WINDOW: tl.constexpr, STRIDE: tl.constexpr, SIDE: tl.constexpr,
    CENTERED: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr, RELATIVE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, VALUES: tl.constexpr,
    TABLE: tl.constexpr, WINDOWS: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    batch, head, block_row, block_col = _block_of_program(down, across, heads)
    row_offset, col_offset, inside, pixel = _queries(
        batch, block_row, block_col, query_height, query_width, SIDE, STRIDE, QUERIES
    )
    q = _load(q_ptr, pixel, inside, head, heads, channels, CHANNELS)
    grad = _load(grad_ptr, pixel, inside, head, heads, value_channels, VALUES)
    output = _load(output_ptr, pixel, inside, head, heads, value_channels, VALUES)
    delta = tl.sum(grad.to(ACC) * output.to(ACC), 1)
    lse = tl.load(lse_ptr + pixel * heads + head, mask=inside, other=0.0)
    grad_q = tl.zeros([QUERIES, CHANNELS], ACC)
    if RELATIVE:
        tables = _load_tables(rows_ptr, cols_ptr, channels // 2, WINDOW, TABLE, CHANNELS)
        positions = _position_products(q, tables, row_offset, col_offset, HALO, WINDOW, TABLE, WINDOWS, ACC, DOT)
        positions = (positions * position_ratio).to(DOT)
        grad_places = tl.zeros([QUERIES, 2 * WINDOWS], ACC)
    c = tl.arange(0, CHANNELS)[None, :]
    e = tl.arange(0, VALUES)[None, :]
    first_row, rows = _extent(block_row, height, BLOCK, HALO, WINDOW, MASKED)
    first_col, cols = _extent(block_col, width, BLOCK, HALO, WINDOW, MASKED)
    line = WINDOW if WHOLE else cols
    for start in range(0, rows * line, KEYS):
        row, col, seen, key_inside, key_pixel = _keys(
            start, batch, block_row, block_col, height, width, first_row, rows, first_col, cols,
            BLOCK, HALO, WINDOW, MASKED, WHOLE, KEYS,
        )  # fmt: skip
        k = _load(k_ptr, key_pixel, key_inside, head, heads, channels, CHANNELS)
        v = _load(v_ptr, key_pixel, key_inside, head, heads, value_channels, VALUES)
        s = product(k, tl.trans(q), ACC, DOT)
        if RELATIVE:
            marks = _marks(row, col, WINDOWS, DOT)
            s += product(marks, tl.trans(positions), ACC, DOT)
        seen = seen[:, None]
        if CENTERED:
            seen = seen & _near(row[:, None], col[:, None], row_offset[None, :], col_offset[None, :], HALO)
        p = tl.where(seen, tl.exp2(s * (scale * LOG2_E) - lse[None, :]), 0.0)
        grad_v = product(p, grad, ACC, DOT)
        grad_p = product(v, tl.trans(grad), ACC, DOT)
        grad_s = (p * (grad_p - delta[None, :])).to(DOT)
        grad_k = product(grad_s, q, ACC, DOT) * scale
        at = (key_pixel * heads + head)[:, None]
        tl.atomic_add(
            grad_v_ptr + at * value_channels + e, grad_v, mask=key_inside[:, None] & (e < value_channels), sem="relaxed"
        )
        tl.atomic_add(grad_k_ptr + at * channels + c, grad_k, mask=key_inside[:, None] & (c < channels), sem="relaxed")
        grad_q += product(tl.trans(grad_s), k, ACC, DOT)
        if RELATIVE:
            grad_places += product(tl.trans(grad_s), marks, ACC, DOT)
    if RELATIVE:
        grad_entries = _to_entries(grad_places, row_offset, col_offset, HALO, WINDOW, TABLE, WINDOWS) * position_ratio
        grad_q += product(grad_entries, tables, ACC, DOT)
        collected = product(tl.trans(grad_entries), q, ACC, DOT) * scale
        row_places, row_mask, col_places, col_mask = _table_entries(channels // 2, WINDOW, TABLE, CHANNELS)
        slot = (tl.program_id(0) % SLOTS) * (2 * WINDOW - 1) * (channels // 2)
        tl.atomic_add(grad_rows_ptr + slot + row_places, collected, mask=row_mask, sem="relaxed")
        tl.atomic_add(grad_cols_ptr + slot + col_places, collected, mask=col_mask, sem="relaxed")
    places = (pixel * heads + head)[:, None] * channels + c
    tl.store(
        grad_q_ptr + places, (grad_q * scale).to(grad_q_ptr.dtype.element_ty), mask=inside[:, None] & (c < channels)
    )


def _run(
    kernel: Any,
    launches: Callable[[int, int], tuple[Launch, ...]],
    tensors: tuple[Tensor, ...],
    plan: HaloPlan,
    relative: bool,
) -> None:
    """Launches a kernel for each block, head and tile of queries, with the first launch parameters that fit the GPU."""
    q, k, v = tensors[:3]
    batch, _, height, width = k.shape
    channels, value_channels = k.shape[1] // plan.heads, v.shape[1] // plan.heads
    side = plan.block // plan.stride
    down, across = pieces(height, plan.block), pieces(width, plan.block)
    sizes = (height, width, *q.shape[2:], down, across, plan.heads, plan.scale, plan.position_scale / plan.scale)
    constants = {
        "channels": channels,
        "value_channels": value_channels,
        "BLOCK": plan.block,
        "HALO": plan.halo,
        "WINDOW": plan.window,
        "STRIDE": plan.stride,
        "SIDE": side,
        "CENTERED": plan.centered,
        "MASKED": plan.mask_padding,
        # Dividing by a power of two takes less time than leaving out the columns beyond the border saves.
        "WHOLE": plan.window == power_of_2(plan.window),
        "RELATIVE": relative,
        "CHANNELS": head_tile(channels),
        "VALUES": head_tile(value_channels),
        "TABLE": tile(2 * plan.window - 1),
        "WINDOWS": tile(plan.window),
    }

    def tiles(launch: Launch) -> tuple[tuple[int, ...], dict[str, int]]:
        queries = tile(side * side, launch.queries)
        grid = (batch * plan.heads * down * across, pieces(side * side, queries))
        return grid, {"QUERIES": queries, "KEYS": tile(plan.window**2, launch.keys)}

    candidates = launches(side * side, max(channels, value_channels))
    run_attention(kernel, (*tensors, *sizes), constants, tiles, candidates)


@partial(Operator, "halo_attention")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel_rows: Tensor | None,
    rel_cols: Tensor | None,
    heads: int,
    block: int,
    halo: int,
    stride: int,
    centered: bool,
    mask_padding: bool,
    scale: float,
    position_scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns the result, and the base-2 logarithm of the softmax denominator for each query and head."""
    plan = HaloPlan(heads, block, halo, stride, centered, mask_padding, scale, position_scale)
    output, lse = _empty_results(q, v, heads)
    relative = rel_rows is not None
    rows, cols = (rel_rows.contiguous(), rel_cols.contiguous()) if relative else (q, q)  # type: ignore[union-attr]
    _run(_forward_kernel, _forward_launches, (q, k, v, rows, cols, output, lse), plan, relative)
    return output, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, rel_rows: Any, rel_cols: Any, heads: int, *plan: Any) -> tuple[Tensor, Tensor]:
    return _empty_results(q, v, heads)


def _empty_results(q: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], v.shape[1], *q.shape[2:])
    output = torch.empty(shape, device=q.device, dtype=v.dtype, memory_format=torch.channels_last)
    accumulate = torch.promote_types(q.dtype, torch.float32)
    return output, torch.empty((q.shape[0], *q.shape[2:], heads), device=q.device, dtype=accumulate)


@partial(Operator, "halo_attention_backward")
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel_rows: Tensor | None,
    rel_cols: Tensor | None,
    output: Tensor,
    lse: Tensor,
    heads: int,
    block: int,
    halo: int,
    stride: int,
    centered: bool,
    mask_padding: bool,
    scale: float,
    position_scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v and both tables. The gradient of a table that is None is an empty tensor."""
    plan = HaloPlan(heads, block, halo, stride, centered, mask_padding, scale, position_scale)
    relative = rel_rows is not None
    grad = grad.to(output.dtype).contiguous(memory_format=torch.channels_last)
    grad_q = torch.empty_like(q)
    grad_k, grad_v = (torch.zeros_like(t, dtype=lse.dtype) for t in (k, v))
    rows, cols = (rel_rows.contiguous(), rel_cols.contiguous()) if relative else (q, q)  # type: ignore[union-attr]
    grad_rows, grad_cols = (lse.new_zeros((SLOTS.value, *t.shape) if relative else (1, 0)) for t in (rows, cols))
    tensors = (q, k, v, rows, cols, output, lse, grad, grad_q, grad_k, grad_v, grad_rows, grad_cols)
    _run(_backward_kernel, _backward_launches, tensors, plan, relative)
    grad_tables = (g.sum(0).to(t.dtype) for g, t in ((grad_rows, rows), (grad_cols, cols)))
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), *grad_tables  # type: ignore[return-value]


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rel_rows: Any, rel_cols: Any, *rest: Any) -> tuple[Tensor, ...]:
    grad_tables = (q.new_empty(0) if table is None else torch.empty_like(table) for table in (rel_rows, rel_cols))
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), *grad_tables


@register_flop_formula(torch.ops.interlayer.halo_attention)
def _flops(
    q: Any, k: Any, v: Any, rows: Any, cols: Any, heads: int, block: int, halo: int, *plan: Any, **_: Any
) -> int:
    """Counts q · k and the weighted sum of values. The arguments are the shapes of the tensors."""
    return 2 * q[0] * q[2] * q[3] * (block + 2 * halo) ** 2 * (k[1] + v[1])


@register_flop_formula(torch.ops.interlayer.halo_attention_backward)
def _backward_flops(
    grad: Any, q: Any, k: Any, v: Any, rows: Any, cols: Any, output: Any, lse: Any, *plan: Any, **_: Any
) -> int:
    """Counts the recomputed weights and four products."""
    return 2 * q[0] * q[2] * q[3] * (plan[1] + 2 * plan[2]) ** 2 * (3 * k[1] + 2 * v[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.plan = inputs[5:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> Any:
    plan_grads = (None,) * len(ctx.plan)
    if grad is None:
        return (None,) * 5 + plan_grads
    saved = ctx.saved_tensors  # gradient checkpointing allows only one access
    grads = _backward(grad, *saved, *ctx.plan)
    tables = grads[3:] if saved[3] is not None else (None, None)
    return *grads[:3], *tables, *plan_grads


_forward.register_autograd(_differentiate, setup_context=_save)


def unsupported_reason(
    q: Tensor, k: Tensor, v: Tensor, rel_rows: Tensor | None, rel_cols: Tensor | None, plan: HaloPlan
) -> str | None:
    if any(not map_.is_contiguous(memory_format=torch.channels_last) for map_ in (q, k, v)):
        return "the maps must be channels_last"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in TYPES:
        return f"the maps must be of one floating-point type, got {q.dtype}, {k.dtype} and {v.dtype}"
    if plan.block % plan.stride:
        return f"expected a block divisible by the stride {plan.stride}, got {plan.block}"
    if plan.window > MOST_WINDOW:
        return f"the neighborhood must be at most {MOST_WINDOW} pixels wide, got {plan.window}"
    if max(k.shape[1], v.shape[1]) > MOST_CHANNELS * plan.heads:
        return f"a head must have at most {MOST_CHANNELS} channels"
    widest = head_tile(k.shape[1] // plan.heads)
    if rel_rows is not None and 2 * tile(2 * plan.window - 1) * widest * q.element_size() > MOST_TABLE_BYTES:
        return f"tables of a neighborhood {plan.window} pixels wide are too large for heads of {widest} channels"
    if plan.scale == 0:
        return "the kernel divides by scale, and scale is 0"
    return device_unsupported_reason(q)


def halo_attention(
    q: Tensor, k: Tensor, v: Tensor, rel_rows: Tensor | None, rel_cols: Tensor | None, plan: HaloPlan
) -> Tensor:
    return _forward(q, k, v, rel_rows, rel_cols, *astuple(plan))[0]
