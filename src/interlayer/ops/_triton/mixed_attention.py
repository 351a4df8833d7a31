"""Attention with mixed heads that stores no map: the sum of squares that the norm needs comes beside the output.

Forward, a program holds a tile of queries of one image and one head j and goes through the keys in chunks with a
running softmax; a chunk's scores are the sum over the heads i of M[j, i] q_i k_iᵀ. Backward, with dU the gradient of
P v, t that of a row's sum of squares and D_i = sum over j of M[j, i] dS'_j,

    dP_j  = dU_j v_jᵀ + 2 t_j P_j
    dS'_j = P_j (dP_j - sum over the row of P_j dP_j),    where that sum is U_j · dU_j + 2 t_j sum P_j²
    dq_i  = s D_i k_i,   dk_i = s D_iᵀ q_i,   dv_i = P_iᵀ dU_i,   dM[j, i] = s sum of dS'_j (q_i k_iᵀ)

One kernel takes tiles of queries for dq, another chunks of keys for dk, dv and dM. Both compute the weights anew.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..mixed_attention import attend_mixed, centred, normalise
from . import (
    INTERPRETED,
    LAUNCHES,
    LEAST_CHANNELS,
    LOG2_E,
    SLOTS,
    TYPES,
    Launch,
    product,
    start_fitting,
    tile,
    why_not_here,
)

MOST_CHANNELS = 128  # of a head


@triton.jit
def _tokens(ptr, batch, rows, row_count, row_stride, head, channels: tl.constexpr, CHANNELS: tl.constexpr):
    """[len(rows), CHANNELS]: a head's channels of some tokens, zero beyond the last token."""
    c = tl.arange(0, CHANNELS)
    places = (batch * row_count + rows)[:, None] * row_stride + head * channels + c[None, :]
    return tl.load(ptr + places, mask=(rows < row_count)[:, None] & (c < channels)[None, :], other=0.0)


@triton.jit
def _store(ptr, value, batch, rows, row_count, head, heads, channels: tl.constexpr, CHANNELS: tl.constexpr):
    """Write a head's channels of some tokens of a map without gaps."""
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
    """S'_j log2 e, [QUERIES, KEYS], without its bias; minus infinity beyond the last key."""
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
    j = tl.program_id(0) % heads
    batch = (tl.program_id(0) // heads).to(tl.int64)
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
    of_row = (batch * heads + j) * queries + m
    tl.store(lse_ptr + of_row, largest + tl.log2(total), mask=m < queries)
    tl.store(squares_ptr + of_row, squares / (total * total), mask=m < queries)


@triton.jit
def _score_gradients(
    q_ptr, k_ptr, v_ptr, mix_ptr, attended_ptr, lse_ptr, squares_ptr, grad_ptr, grad_squares_ptr,
    batch, j, m, n, queries, keys, q_stride, k_stride, v_stride, scale,
    heads: tl.constexpr, channels: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """P_j, dS'_j and dU_j of a tile of queries and a chunk of keys."""
    s = _mixed_scores(
        q_ptr, k_ptr, mix_ptr, batch, j, m, n, queries, keys, q_stride, k_stride, scale,
        heads, channels, QUERIES, KEYS, CHANNELS, ACC, DOT,
    )  # fmt: skip
    of_row = (batch * heads + j) * queries + m
    lse = tl.load(lse_ptr + of_row, mask=m < queries, other=float("inf"))  # no weight beyond the last query
    squares = tl.load(squares_ptr + of_row, mask=m < queries, other=0.0)
    grad_squares = tl.load(grad_squares_ptr + of_row, mask=m < queries, other=0.0)
    p = tl.exp2(s - lse[:, None])
    grad = _tokens(grad_ptr, batch, m, queries, heads * channels, j, channels, CHANNELS)
    attended = _tokens(attended_ptr, batch, m, queries, heads * channels, j, channels, CHANNELS)
    row_sum = tl.sum(grad.to(ACC) * attended.to(ACC), 1) + 2 * grad_squares * squares
    v = _tokens(v_ptr, batch, n, keys, v_stride, j, channels, CHANNELS)
    grad_p = product(grad, tl.trans(v), ACC, DOT) + 2 * grad_squares[:, None] * p
    return p, p * (grad_p - row_sum[:, None]), grad


@triton.jit
def _query_gradients_kernel(
    q_ptr, k_ptr, v_ptr, mix_ptr, attended_ptr, lse_ptr, squares_ptr,  # as in the forward kernel
    grad_ptr, grad_squares_ptr,  # of attended and squares
    grad_q_ptr,  # [batch, queries, heads channels]
    queries, keys, q_stride, k_stride, v_stride, scale,
    heads: tl.constexpr, channels: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) % heads
    batch = (tl.program_id(0) // heads).to(tl.int64)
    m = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    grad_q = tl.zeros([QUERIES, CHANNELS], ACC)
    for start in range(0, keys, KEYS):
        n = start + tl.arange(0, KEYS)
        mixed = tl.zeros([QUERIES, KEYS], ACC)
        for j in range(heads):
            _, grad_s, _ = _score_gradients(
                q_ptr, k_ptr, v_ptr, mix_ptr, attended_ptr, lse_ptr, squares_ptr, grad_ptr, grad_squares_ptr,
                batch, j, m, n, queries, keys, q_stride, k_stride, v_stride, scale,
                heads, channels, QUERIES, KEYS, CHANNELS, ACC, DOT,
            )  # fmt: skip
            mixed += tl.load(mix_ptr + j * heads + i).to(ACC) * grad_s
        k = _tokens(k_ptr, batch, n, keys, k_stride, i, channels, CHANNELS)
        grad_q += product(mixed, k, ACC, DOT)
    _store(grad_q_ptr, grad_q * scale, batch, m, queries, i, heads, channels, CHANNELS)


@triton.jit
def _key_gradients_kernel(
    q_ptr, k_ptr, v_ptr, mix_ptr, attended_ptr, lse_ptr, squares_ptr, grad_ptr, grad_squares_ptr,  # as above
    grad_k_ptr, grad_v_ptr,  # [batch, keys, heads channels]
    grad_mix_ptr,  # [SLOTS, heads, heads], float32
    queries, keys, q_stride, k_stride, v_stride, scale,
    heads: tl.constexpr, channels: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) % heads
    batch = (tl.program_id(0) // heads).to(tl.int64)
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
            p, grad_s, grad = _score_gradients(
                q_ptr, k_ptr, v_ptr, mix_ptr, attended_ptr, lse_ptr, squares_ptr, grad_ptr, grad_squares_ptr,
                batch, j, m, n, queries, keys, q_stride, k_stride, v_stride, scale,
                heads, channels, QUERIES, KEYS, CHANNELS, ACC, DOT,
            )  # fmt: skip
            mixed += tl.load(mix_ptr + j * heads + i).to(ACC) * grad_s
            tl.atomic_add(
                grad_mix_ptr + slot + j * heads + i, tl.sum(tl.sum(grad_s * own, 1), 0) * scale, sem="relaxed"
            )
            if j == i:
                grad_v += product(tl.trans(p), grad, ACC, DOT)
        grad_k += product(tl.trans(mixed), q, ACC, DOT)
    _store(grad_k_ptr, grad_k * scale, batch, n, keys, i, heads, channels, CHANNELS)
    _store(grad_v_ptr, grad_v, batch, n, keys, i, heads, channels, CHANNELS)


def _run(kernel: Any, of: str, tensors: tuple[Tensor, ...], heads: int, scale: float) -> None:
    """Start a kernel for every image, head and tile of "queries" or chunk of "keys"."""
    q, k, v = tensors[:3]
    (batch, queries, width), keys = q.shape, k.shape[1]
    accumulate = tl.float64 if q.dtype == torch.float64 else tl.float32
    constants = {
        "heads": heads,
        "channels": width // heads,
        "CHANNELS": tile(max(LEAST_CHANNELS, width // heads)),
        "ACC": accumulate,
        "DOT": accumulate if INTERPRETED else TYPES[q.dtype],  # the interpreter knows no products of bfloat16
    }

    def run(launch: Launch) -> None:
        of_queries, of_keys = tile(queries, launch.queries), tile(keys, launch.keys)
        pieces = triton.cdiv(queries, of_queries) if of == "queries" else triton.cdiv(keys, of_keys)
        with torch.cuda.device_of(q):
            kernel[batch * heads, pieces](
                *tensors, queries, keys, q.stride(1), k.stride(1), v.stride(1), scale, **constants,
                QUERIES=of_queries, KEYS=of_keys, num_warps=launch.warps, num_stages=launch.stages,
            )  # fmt: skip

    start_fitting((kernel.fn.__name__, q.dtype, q.device, *constants.values()), LAUNCHES, run)


@torch.library.custom_op("interlayer::mixed_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, mix: Tensor, heads: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """P v, the sum of squares of every row of P, and the base-2 logarithm of its softmax's denominator."""
    attended, squares, lse = _empty_results(q, heads)
    _run(_forward_kernel, "queries", (q, k, v, mix.contiguous(), attended, lse, squares), heads, scale)
    return attended, squares, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mix: Tensor, heads: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_results(q, heads)


def _empty_results(q: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    of_rows = {"device": q.device, "dtype": torch.promote_types(q.dtype, torch.float32)}
    squares, lse = (torch.empty((q.shape[0], heads, q.shape[1]), **of_rows) for _ in range(2))  # type: ignore[call-overload]
    return torch.empty(q.shape, device=q.device, dtype=q.dtype), squares, lse


@torch.library.custom_op("interlayer::mixed_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    grad_squares: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix: Tensor,
    attended: Tensor,
    squares: Tensor,
    lse: Tensor,
    heads: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and mix."""
    given = (
        q,
        k,
        v,
        mix.contiguous(),
        attended,
        lse,
        squares,
        grad.to(q.dtype).contiguous(),
        grad_squares.contiguous(),
    )
    grad_q, grad_k, grad_v = (torch.empty(t.shape, device=t.device, dtype=t.dtype) for t in (q, k, v))
    grad_mix = lse.new_zeros((SLOTS.value, heads, heads))
    _run(_query_gradients_kernel, "queries", (*given, grad_q), heads, scale)
    _run(_key_gradients_kernel, "keys", (*given, grad_k, grad_v, grad_mix), heads, scale)
    return grad_q, grad_k, grad_v, grad_mix.sum(0).to(mix.dtype)


@_backward.register_fake
def _(grad: Tensor, grad_squares: Tensor, q: Tensor, k: Tensor, v: Tensor, mix: Tensor, *rest: Any) -> Any:
    return tuple(torch.empty(t.shape, device=t.device, dtype=t.dtype) for t in (q, k, v, mix))


@register_flop_formula(torch.ops.interlayer.mixed_attention)
def _flops(q: Any, k: Any, v: Any, mix: Any, *rest: Any, **_: Any) -> int:
    """As the equations have it: q · k, the mixture and P v, each once for each head; shapes stand for the tokens."""
    return 2 * q[0] * q[1] * k[1] * (2 * q[2] + mix[0] ** 2)


@register_flop_formula(torch.ops.interlayer.mixed_attention_backward)
def _backward_flops(grad: Any, grad_squares: Any, q: Any, k: Any, v: Any, mix: Any, *rest: Any, **_: Any) -> int:
    return 2 * q[0] * q[1] * k[1] * (5 * q[2] + 3 * mix[0] ** 2)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.heads, ctx.scale = inputs[4:]


def _differentiate(ctx: Any, grad: Tensor, grad_squares: Tensor, grad_lse: Tensor) -> Any:
    return *_backward(grad, grad_squares, *ctx.saved_tensors, ctx.heads, ctx.scale), None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


def _objection(
    q: Tensor, k: Tensor, v: Tensor, mix: Tensor, bias: Tensor, heads: int, scale: float, eps: float
) -> str | None:
    if not q.dtype == k.dtype == v.dtype or q.dtype not in TYPES:
        return f"the tokens must be of one floating-point type, got {q.dtype}, {k.dtype} and {v.dtype}"
    if any(t.stride(2) != 1 or t.stride(0) != t.shape[1] * t.stride(1) for t in (q, k)):
        return "tokens must lie one after another, their channels together"
    if q.shape[2] > MOST_CHANNELS * heads:
        return f"a head must have at most {MOST_CHANNELS} channels, got {q.shape[2] // heads}"
    return why_not_here(q)


@attend_mixed.kernel("triton", _objection)
def _fused(q: Tensor, k: Tensor, v: Tensor, mix: Tensor, bias: Tensor, heads: int, scale: float, eps: float) -> Tensor:
    attended, squares, _ = _forward(q, k, centred(v), mix, heads, scale)
    return normalise(attended, squares, k.shape[1], bias, eps)
