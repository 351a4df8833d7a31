"""Attention with mixed heads that stores no attention map: one kernel computes the output and the sums of squares.

In the forward pass, the average is subtracted from the values first. A program then holds a tile of queries of one
image and one head j and iterates over chunks of keys with an online softmax. The scores of a chunk are the sum over the
heads i of M[j, i] q_i k_iᵀ. The factor r_j of the norm is computed from the sums of squares and multiplied by the
result. In the backward pass, with the gradient g of the result o, the gradient of the sum of squares of a row
t_j = -r_j² (sum of g_j · o_j) / (2 n n'), and D_i = sum over j of M[j, i] dS'_j,

    dP_j  = r_j g_j v_jᵀ + 2 t_j P_j
    dS'_j = P_j (dP_j - sum over the row of P_j dP_j),    where that sum is o_j · g_j + 2 t_j sum P_j²
    dq_i  = s D_i k_i,   dk_i = s D_iᵀ q_i,   dv_i = r_i P_iᵀ g_i,   dM[j, i] = s sum of dS'_j (q_i k_iᵀ)

The first kernel computes o · g and t from the rows, the second dq from tiles of queries, and the third dk, dv and dM
from chunks of keys. The last two recompute the weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .broadcast_context import subtract_average
from .runtime import (
    LOG2_E,
    SLOTS,
    TYPES,
    Launch,
    Operator,
    device_unsupported_reason,
    head_tile,
    pieces,
    product,
    run_attention,
    run_kernel,
    tile,
)

MOST_CHANNELS = 128  # channels of a head


@triton.jit
def _head_of_program(heads: tl.constexpr):
    """Returns batch and head. Heads vary fastest, because they share cache lines."""
    program = tl.program_id(0)
    return (program // heads).to(tl.int64), program % heads


@triton.jit
def _tokens(ptr, batch, rows, row_count, row_stride, head, channels: tl.constexpr, CHANNELS: tl.constexpr):
    """Loads the channels of a head for some tokens, [len(rows), CHANNELS], with zeros beyond the last token."""
    c = tl.arange(0, CHANNELS)
    places = (batch * row_count + rows)[:, None] * row_stride + head * channels + c[None, :]
    return tl.load(ptr + places, mask=(rows < row_count)[:, None] & (c < channels)[None, :], other=0.0)


@triton.jit
def _store(ptr, value, batch, rows, row_count, head, heads, channels: tl.constexpr, CHANNELS: tl.constexpr):
    """Stores the channels of a head for some tokens of a contiguous tensor."""
    c = tl.arange(0, CHANNELS)
    places = ((batch * row_count + rows)[:, None] * heads + head) * channels + c[None, :]
    mask = (rows < row_count)[:, None] & (c < channels)[None, :]
    tl.store(ptr + places, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _mixed_scores(
    q_ptr, k_ptr, mix_ptr, batch, j, m, n, queries, keys, q_stride, k_stride, scale,
    heads: tl.constexpr, channels: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Computes S'_j log2 e, [QUERIES, KEYS], without its bias, and minus infinity beyond the last key."""
    s = tl.zeros([QUERIES, KEYS], ACC)
    for i in range(heads):
        q = _tokens(q_ptr, batch, m, queries, q_stride, i, channels, CHANNELS)
        k = _tokens(k_ptr, batch, n, keys, k_stride, i, channels, CHANNELS)
        s += tl.load(mix_ptr + j * heads + i).to(ACC) * product(q, tl.trans(k), ACC, DOT)
    return tl.where((n < keys)[None, :], s * (scale * LOG2_E), float("-inf"))


@triton.jit
def _forward_kernel(
    q_ptr,  # [batch, queries, heads channels], rows q_stride apart
    k_ptr, v_ptr,  # [batch, keys, heads channels], rows k_stride and v_stride apart
    mix_ptr,  # [heads, heads]
    attended_ptr,  # [batch, queries, heads channels]
    lse_ptr,  # [batch, heads, queries]: base-2 logarithm of the sum of exponentials
    squares_ptr,  # [batch, heads, queries]: sum of the squared weights
    queries, keys, q_stride, k_stride, v_stride, scale,
    heads: tl.constexpr, channels: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    batch, j = _head_of_program(heads)
    m = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    largest = tl.full([QUERIES], float("-inf"), ACC)
    total = tl.zeros([QUERIES], ACC)
    squares = tl.zeros([QUERIES], ACC)
    attended = tl.zeros([QUERIES, CHANNELS], ACC)
    for start in range(0, keys, KEYS):
        n = start + tl.arange(0, KEYS)
        s = _mixed_scores(
            q_ptr, k_ptr, mix_ptr, batch, j, m, n, queries, keys, q_stride, k_stride, scale,
            heads, channels, QUERIES, KEYS, CHANNELS, ACC, DOT,
        )  # fmt: skip
        larger = tl.maximum(largest, tl.max(s, 1))
        p = tl.exp2(s - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(p, 1)
        squares = squares * shrink * shrink + tl.sum(p * p, 1)
        v = _tokens(v_ptr, batch, n, keys, v_stride, j, channels, CHANNELS)
        attended = attended * shrink[:, None] + product(p, v, ACC, DOT)
        largest = larger
    _store(attended_ptr, attended / total[:, None], batch, m, queries, j, heads, channels, CHANNELS)
    row = (batch * heads + j) * queries + m
    tl.store(lse_ptr + row, largest + tl.log2(total), mask=m < queries)
    tl.store(squares_ptr + row, squares / (total * total), mask=m < queries)


@triton.jit
def _normalize_kernel(
    squares_ptr,  # [batch, heads, queries]
    output_ptr,  # [batch, queries, heads channels]: P v, overwritten by r P v
    factor_ptr,  # [batch, heads]: r
    queries, keys, eps,
    heads: tl.constexpr, channels: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    batch, j = _head_of_program(heads)
    total = tl.zeros([ROWS], ACC)
    for start in range(0, queries, ROWS):
        m = start + tl.arange(0, ROWS)
        total += tl.load(squares_ptr + (batch * heads + j) * queries + m, mask=m < queries, other=0.0)
    mean = tl.full([], 1.0, ACC) / keys
    variance = tl.sum(total, 0) / queries * mean - mean * mean
    factor = 1 / tl.sqrt(tl.maximum(variance, 0.0) + eps)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = _tokens(output_ptr, batch, m, queries, heads * channels, j, channels, CHANNELS)
    _store(output_ptr, output.to(ACC) * factor, batch, m, queries, j, heads, channels, CHANNELS)
    if tl.program_id(1) == 0:
        tl.store(factor_ptr + batch * heads + j, factor)


@triton.jit
def _row_gradients_kernel(
    grad_ptr, output_ptr,  # [batch, queries, heads channels]
    factor_ptr,  # [batch, heads]
    dots_ptr,  # [batch, heads, queries]: o · g
    grad_squares_ptr,  # [batch, heads]: t
    queries, keys,
    heads: tl.constexpr, channels: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    batch, j = _head_of_program(heads)
    total = tl.zeros([ROWS], ACC)
    for start in range(0, queries, ROWS):
        m = start + tl.arange(0, ROWS)
        grad = _tokens(grad_ptr, batch, m, queries, heads * channels, j, channels, CHANNELS)
        output = _tokens(output_ptr, batch, m, queries, heads * channels, j, channels, CHANNELS)
        dots = tl.sum(grad.to(ACC) * output.to(ACC), 1)
        tl.store(dots_ptr + (batch * heads + j) * queries + m, dots, mask=m < queries)
        total += dots
    r = tl.load(factor_ptr + batch * heads + j)
    tl.store(grad_squares_ptr + batch * heads + j, -0.5 * r * r * tl.sum(total, 0) / queries / keys)


@triton.jit
def _score_gradients(
    q_ptr, k_ptr, v_ptr, mix_ptr, lse_ptr, squares_ptr, factor_ptr, grad_ptr, dots_ptr, grad_squares_ptr,
    batch, j, m, n, queries, keys, q_stride, k_stride, v_stride, scale,
    heads: tl.constexpr, channels: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Computes P_j, dS'_j, g_j and r_j for a tile of queries and a chunk of keys."""
    s = _mixed_scores(
        q_ptr, k_ptr, mix_ptr, batch, j, m, n, queries, keys, q_stride, k_stride, scale,
        heads, channels, QUERIES, KEYS, CHANNELS, ACC, DOT,
    )  # fmt: skip
    head = batch * heads + j
    row = head * queries + m
    lse = tl.load(lse_ptr + row, mask=m < queries, other=float("inf"))  # the weights beyond the last query are zero
    twice = 2 * tl.load(grad_squares_ptr + head)
    row_sum = tl.load(dots_ptr + row, mask=m < queries, other=0.0)
    row_sum += twice * tl.load(squares_ptr + row, mask=m < queries, other=0.0)
    factor = tl.load(factor_ptr + head)
    p = tl.exp2(s - lse[:, None])
    grad = _tokens(grad_ptr, batch, m, queries, heads * channels, j, channels, CHANNELS)
    v = _tokens(v_ptr, batch, n, keys, v_stride, j, channels, CHANNELS)
    grad_p = product(grad, tl.trans(v), ACC, DOT) * factor + twice * p
    return p, p * (grad_p - row_sum[:, None]), grad, factor


@triton.jit
def _query_gradients_kernel(
    q_ptr, k_ptr, v_ptr, mix_ptr, lse_ptr, squares_ptr, factor_ptr,  # as in the forward kernels
    grad_ptr, dots_ptr, grad_squares_ptr,
    grad_q_ptr,  # [batch, queries, heads channels]
    queries, keys, q_stride, k_stride, v_stride, scale,
    heads: tl.constexpr, channels: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    batch, i = _head_of_program(heads)
    m = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    grad_q = tl.zeros([QUERIES, CHANNELS], ACC)
    for start in range(0, keys, KEYS):
        n = start + tl.arange(0, KEYS)
        mixed = tl.zeros([QUERIES, KEYS], ACC)
        for j in range(heads):
            _, grad_s, _, _ = _score_gradients(
                q_ptr, k_ptr, v_ptr, mix_ptr, lse_ptr, squares_ptr, factor_ptr, grad_ptr, dots_ptr, grad_squares_ptr,
                batch, j, m, n, queries, keys, q_stride, k_stride, v_stride, scale,
                heads, channels, QUERIES, KEYS, CHANNELS, ACC, DOT,
            )  # fmt: skip
            mixed += tl.load(mix_ptr + j * heads + i).to(ACC) * grad_s
        k = _tokens(k_ptr, batch, n, keys, k_stride, i, channels, CHANNELS)
        grad_q += product(mixed, k, ACC, DOT)
    _store(grad_q_ptr, grad_q * scale, batch, m, queries, i, heads, channels, CHANNELS)


@triton.jit
def _key_gradients_kernel(
    q_ptr, k_ptr, v_ptr, mix_ptr, lse_ptr, squares_ptr, factor_ptr, grad_ptr, dots_ptr, grad_squares_ptr,  # as above
    grad_k_ptr, grad_v_ptr,  # [batch, keys, heads channels]
    grad_mix_ptr,  # [SLOTS, heads, heads], float32
    queries, keys, q_stride, k_stride, v_stride, scale,
    heads: tl.constexpr, channels: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    batch, i = _head_of_program(heads)
    n = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    k = _tokens(k_ptr, batch, n, keys, k_stride, i, channels, CHANNELS)
    grad_k = tl.zeros([KEYS, CHANNELS], ACC)
    grad_v = tl.zeros([KEYS, CHANNELS], ACC)
    slot = (tl.program_id(0) // heads) % SLOTS * heads * heads
    for start in range(0, queries, QUERIES):
        m = start + tl.arange(0, QUERIES)
        q = _tokens(q_ptr, batch, m, queries, q_stride, i, channels, CHANNELS)
        own = product(q, tl.trans(k), ACC, DOT)
        mixed = tl.zeros([QUERIES, KEYS], ACC)
        for j in range(heads):
            p, grad_s, grad, factor = _score_gradients(
                q_ptr, k_ptr, v_ptr, mix_ptr, lse_ptr, squares_ptr, factor_ptr, grad_ptr, dots_ptr, grad_squares_ptr,
                batch, j, m, n, queries, keys, q_stride, k_stride, v_stride, scale,
                heads, channels, QUERIES, KEYS, CHANNELS, ACC, DOT,
            )  # fmt: skip
            mixed += tl.load(mix_ptr + j * heads + i).to(ACC) * grad_s
            tl.atomic_add(
                grad_mix_ptr + slot + j * heads + i, tl.sum(tl.sum(grad_s * own, 1), 0) * scale, sem="relaxed"
            )
            if j == i:
                grad_v += product(tl.trans(p), grad, ACC, DOT) * factor
        grad_k += product(tl.trans(mixed), q, ACC, DOT)
    _store(grad_k_ptr, grad_k * scale, batch, n, keys, i, heads, channels, CHANNELS)
    _store(grad_v_ptr, grad_v, batch, n, keys, i, heads, channels, CHANNELS)


def _run(kernel: Any, along: str, tensors: tuple[Tensor, ...], heads: int, scale: float) -> None:
    """Launches a kernel for each image, head and tile of queries (`along="queries"`) or chunk of keys ("keys")."""
    q, k, v = tensors[:3]
    (batch, queries, width), keys = q.shape, k.shape[1]
    channels = width // heads
    args = (*tensors, queries, keys, q.stride(1), k.stride(1), v.stride(1), scale)

    def tiles(launch: Launch) -> tuple[tuple[int, ...], dict[str, int]]:
        query_tile, key_tile = tile(queries, launch.queries), tile(keys, launch.keys)
        number = pieces(queries, query_tile) if along == "queries" else pieces(keys, key_tile)
        return (batch * heads, number), {"QUERIES": query_tile, "KEYS": key_tile}

    run_attention(kernel, args, {"heads": heads, "channels": channels, "CHANNELS": head_tile(channels)}, tiles)


def _row_constants(q: Tensor, heads: int, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the constants of the kernels that process rows of queries and no keys."""
    channels = q.shape[2] // heads
    sizes = {"ROWS": tile(q.shape[1], 64), "CHANNELS": tile(channels)}
    return {"heads": heads, "channels": channels, **sizes, "ACC": TYPES[dtype]}


@partial(Operator, "mixed_attention")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, mix: Tensor, bias: Tensor, heads: int, scale: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the result and the tensors that the backward pass needs.

    These are the values minus their average, the base-2 logarithm of the softmax denominator and the sum of squares of
    each row of P, and the factor r of each head.
    """
    values = subtract_average(v)
    output, lse, squares, factor = _empty_results(q, heads)
    _run(_forward_kernel, "queries", (q, k, values, mix.contiguous(), output, lse, squares), heads, scale)
    constants = _row_constants(q, heads, lse.dtype)
    run_kernel(
        _normalize_kernel, (factor.numel(), pieces(q.shape[1], constants["ROWS"])),
        squares, output, factor, q.shape[1], k.shape[1], eps, **constants,
    )  # fmt: skip
    return output, values, lse, squares, factor


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mix: Tensor, bias: Tensor, heads: int, *options: Any) -> tuple[Tensor, ...]:
    output, *statistics = _empty_results(q, heads)
    return output, torch.empty(v.shape, device=v.device, dtype=v.dtype), *statistics


def _empty_results(q: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, queries, _ = q.shape
    accumulate = torch.promote_types(q.dtype, torch.float32)
    lse, squares = (torch.empty((batch, heads, queries), device=q.device, dtype=accumulate) for _ in range(2))
    output = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    return output, lse, squares, torch.empty((batch, heads), device=q.device, dtype=accumulate)


@partial(Operator, "mixed_attention_backward")
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    mix: Tensor,
    output: Tensor,
    values: Tensor,
    lse: Tensor,
    squares: Tensor,
    factor: Tensor,
    heads: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v and mix."""
    grad = grad.to(q.dtype).contiguous()
    dots, grad_squares = torch.empty_like(squares), torch.empty_like(factor)
    run_kernel(
        _row_gradients_kernel, (factor.numel(),),
        grad, output, factor, dots, grad_squares, q.shape[1], k.shape[1], **_row_constants(q, heads, lse.dtype),
    )  # fmt: skip
    inputs = (q, k, values, mix.contiguous(), lse, squares, factor, grad, dots, grad_squares)
    grad_q, grad_k, grad_values = (torch.empty(t.shape, device=t.device, dtype=t.dtype) for t in (q, k, values))
    grad_mix = lse.new_zeros((SLOTS.value, heads, heads))
    _run(_query_gradients_kernel, "queries", (*inputs, grad_q), heads, scale)
    _run(_key_gradients_kernel, "keys", (*inputs, grad_k, grad_values, grad_mix), heads, scale)
    return grad_q, grad_k, subtract_average(grad_values), grad_mix.sum(0).to(mix.dtype)


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, mix: Tensor, output: Tensor, values: Tensor, *rest: Any) -> Any:
    return tuple(torch.empty(t.shape, device=t.device, dtype=t.dtype) for t in (q, k, values, mix))


@register_flop_formula(torch.ops.interlayer.mixed_attention)
def _flops(q: Any, k: Any, v: Any, mix: Any, *rest: Any, **_: Any) -> int:
    """Counts q · k, the mixing and P v, once for each head. The arguments are the shapes of the tensors."""
    return 2 * q[0] * q[1] * k[1] * (2 * q[2] + mix[0] ** 2)


@register_flop_formula(torch.ops.interlayer.mixed_attention_backward)
def _backward_flops(grad: Any, q: Any, k: Any, mix: Any, *rest: Any, **_: Any) -> int:
    return 2 * q[0] * q[1] * k[1] * (5 * q[2] + 3 * mix[0] ** 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, _, mix, bias, ctx.heads, ctx.scale, _ = inputs
    ctx.save_for_backward(q, k, mix, bias, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *others: Any) -> Any:
    if grad is None:
        return (None,) * 8
    q, k, mix, bias, *outputs = ctx.saved_tensors
    grads = _backward(grad, q, k, mix, *outputs, ctx.heads, ctx.scale)
    return *grads, torch.zeros_like(bias), None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def unsupported_reason(
    q: Tensor, k: Tensor, v: Tensor, mix: Tensor, bias: Tensor, heads: int, scale: float, eps: float
) -> str | None:
    if not q.dtype == k.dtype == v.dtype or q.dtype not in TYPES:
        return f"the tokens must be of one floating-point type, got {q.dtype}, {k.dtype} and {v.dtype}"
    if any(t.stride(2) != 1 or t.stride(0) != t.shape[1] * t.stride(1) for t in (q, k, v)):
        return "tokens must lie one after another, and the channels of each token must be contiguous"
    if q.shape[2] > MOST_CHANNELS * heads:
        return f"a head must have at most {MOST_CHANNELS} channels, got {q.shape[2] // heads}"
    return device_unsupported_reason(q)


def mixed_attention(
    q: Tensor, k: Tensor, v: Tensor, mix: Tensor, bias: Tensor, heads: int, scale: float, eps: float
) -> Tensor:
    output: Tensor = _forward(q, k, v, mix, bias, heads, scale, eps)[0]
    return output
