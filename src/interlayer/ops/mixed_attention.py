"""Attention with scores that are mixed over the heads before the softmax and normalized after it.

Paper: ResT: An Efficient Transformer for Visual Recognition, NeurIPS 2021, the attention of EMSA. For queries q_i, keys
k_i and values v_i of the heads i = 1 .. heads,

    S_i  = q_i k_iᵀ s                                     [n, n']
    S'_j = sum over i of M[j, i] S_i + bias_j             a 1x1 convolution over the heads
    P_j  = softmax(S'_j)                                  each row sums to one
    A_j  = (P_j - mean P_j) / sqrt(var P_j + eps)         instance norm over the attention map
    o_j  = A_j v_j

    q        [B, n, heads d]     tokens; the channels of a head are contiguous
    k, v     [B, n', heads d]
    mix      [heads, heads]: M
    result   [B, n, heads d]

The attention map need not be stored. The rows of P sum to one, so its mean is exactly 1 / n', and its variance follows
from the sum of squares: var P_j = sum P_j² / (n n') - 1 / n'². Then

    o_j = r_j P_j (v_j - mean over the keys of v_j),   r_j = (sum P_j² / (n n') - 1 / n'² + eps)^(-1/2)

The bias bias_j is constant over a row, so it has no effect and its gradient is zero. The mean is subtracted from the
values rather than from P v, because r can be in the hundreds and would amplify the rounding error of P v.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import check_tokens, split_heads
from .dispatch import Implementation, Operation, triton_implementation

EPS = 1e-5  # of the instance norm


def mixed_attention(
    q: Tensor, k: Tensor, v: Tensor, mix: Tensor, bias: Tensor, *, heads: int, scale: float, eps: float = EPS
) -> Tensor:
    """Computes attention with mixed and normalized heads.

    See the module docstring for the equations.

    Args:
        q: Queries, [B, n, C].
        k: Keys, [B, n', C].
        v: Values, [B, n', C].
        mix: The weight of the 1x1 convolution over the heads, [heads, heads].
        bias: The bias of that convolution, [heads].
        heads: The number of heads.
        scale: The factor s of the scores.
        eps: The value added to the variance in the instance norm.
    """
    _check(q, k, v, mix, bias, heads)
    return mixed_attention_operation(q, k, v, mix, bias, heads, scale, eps)


class MixedMaps(NamedTuple):
    """The maps of an attention with mixed heads, [B, heads, n, n'] each.

    Args:
        scores: S, the scaled products of queries and keys, before the mixing.
        mixed: S', after the mixing, before the softmax.
        weights: P, after the softmax. Each row sums to one.
        normalized: A, after the instance norm, with which the values are multiplied.
    """

    scores: Tensor
    mixed: Tensor
    weights: Tensor
    normalized: Tensor


def mixed_attention_maps(
    q: Tensor, k: Tensor, mix: Tensor, bias: Tensor, *, heads: int, scale: float, eps: float = EPS
) -> MixedMaps:
    """Returns the maps that :func:`mixed_attention` computes on the way, with its arguments except for the values."""
    _check(q, k, k, mix, bias, heads)
    return _maps(q, k, mix, bias, heads, scale, eps)


def _maps(q: Tensor, k: Tensor, mix: Tensor, bias: Tensor, heads: int, scale: float, eps: float) -> MixedMaps:
    queries, keys = split_heads(q, k, heads=heads)
    scores = (queries @ keys.transpose(-2, -1)) * scale
    mixed = F.conv2d(scores, mix[..., None, None], bias)
    weights = mixed.softmax(-1)
    one_value = weights.shape[2] * weights.shape[3] == 1  # torch's instance norm raises an error for it
    normalized = weights * 0 if one_value else F.instance_norm(weights, eps=eps)
    return MixedMaps(scores, mixed, weights, normalized)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, mix: Tensor, bias: Tensor, heads: int, scale: float, eps: float
) -> Tensor:
    """Computes the equations step by step and stores every map."""
    (values,) = split_heads(v, heads=heads)
    normalized = _maps(q, k, mix, bias, heads, scale, eps).normalized
    return (normalized.to(v.dtype) @ values).transpose(1, 2).flatten(2)


def _check(q: Tensor, k: Tensor, v: Tensor, mix: Tensor, bias: Tensor, heads: int) -> None:
    check_tokens(q, k, v, heads)
    if tuple(mix.shape) != (heads, heads) or tuple(bias.shape) != (heads,):
        raise ValueError(
            f"expected weights and bias over heads of {(heads, heads)} and {(heads,)}, got {tuple(mix.shape)} and "
            f"{tuple(bias.shape)}"
        )


def _affine(q: Tensor, k: Tensor, v: Tensor, mix: Tensor, bias: Tensor, heads: int, scale: float, eps: float) -> Tensor:
    """Applies the norm to the result instead of the map, and stores neither S' nor A."""
    queries, keys, values = split_heads(q, k, _subtract_mean(v), heads=heads)
    scores = queries @ keys.transpose(-2, -1)
    mixed = torch.einsum("ji,binm->bjnm", (mix * scale).to(scores.dtype), scores)
    weights = mixed.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    squares = weights.square().sum(-1)
    attended = (weights.to(v.dtype) @ values).transpose(1, 2).flatten(2)
    return _normalize(attended, squares, k.shape[1], bias, eps)


def _subtract_mean(v: Tensor) -> Tensor:
    """Subtracts the mean over the keys from the values. The mean is accumulated in float32 or float64."""
    wide = v.to(torch.promote_types(v.dtype, torch.float32))
    return (wide - wide.mean(1, keepdim=True)).to(v.dtype)


def _normalize(attended: Tensor, squares: Tensor, keys: int, bias: Tensor, eps: float) -> Tensor:
    """Applies the instance norm to the product of P and the values minus their mean.

    Args:
        attended: The product, [B, n, C].
        squares: The sum of P² for each head and query, [B, heads, n].
        keys: The number n' of keys.
        bias: The bias of the convolution, [heads]. It has no effect, but receives its gradient of zero.
        eps: The value added to the variance.
    """
    heads, queries = squares.shape[1:]
    variance = squares.sum(-1) / (queries * keys) - 1 / keys**2
    factor = (variance.clamp_min(0) + eps).rsqrt() + 0 * bias  # [B, heads]
    return attended * factor.repeat_interleave(attended.shape[2] // heads, 1)[:, None].to(attended.dtype)


def _affine_unsupported_reason(*args: object) -> str | None:
    return None


mixed_attention_operation = Operation(
    "mixed_attention",
    _reference,
    [*triton_implementation("mixed_attention"), Implementation("affine", _affine, _affine_unsupported_reason)],
)
