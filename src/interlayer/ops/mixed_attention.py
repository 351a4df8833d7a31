"""Attention whose heads mix their scores before the softmax and are normalised after it.

Paper: ResT: An Efficient Transformer for Visual Recognition, NeurIPS 2021, the attention of EMSA. For queries q_i, keys
k_i and values v_i of the heads i = 1 .. heads,

    S_i  = q_i k_iᵀ s                                     [n, n']
    S'_j = sum over i of M[j, i] S_i + bias_j             a 1x1 convolution over the heads
    P_j  = softmax(S'_j)                                  each row sums to one
    A_j  = (P_j - mean P_j) / sqrt(var P_j + eps)         instance norm over the whole map
    o_j  = A_j v_j

    q        [B, n, heads d]     tokens, the heads' channels one after another
    k, v     [B, n', heads d]
    mix      [heads, heads]: M
    result   [B, n, heads d]

No map need be stored. Rows of P sum to one, so its mean is 1 / n' exactly, and its variance needs only the sum of
squares: var P_j = sum P_j² / (n n') - 1 / n'². Then

    o_j = r_j (P_j v_j - mean over the keys of v_j),   r_j = (sum P_j² / (n n') - 1 / n'² + eps)^(-1/2)

and bias_j, the same for a whole row, changes nothing: its gradient is zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import Operation

EPS = 1e-5  # of the instance norm


@Operation
def mixed_attention(
    q: Tensor, k: Tensor, v: Tensor, mix: Tensor, bias: Tensor, *, heads: int, scale: float, eps: float = EPS
) -> Tensor:
    """The published arrangement: one operation after another, every map stored.

    Args:
        q, k, v: tokens, [B, n, C], [B, n', C] and [B, n', C].
        mix, bias: of the 1x1 convolution over heads, [heads, heads] and [heads].
        heads: number of heads, more than one.
        scale: s.
        eps: of the instance norm.
    """
    queries, keys, values = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))  # [B, heads, ., d]
    scores = (queries @ keys.transpose(-2, -1)) * scale
    weights = F.conv2d(scores, mix[..., None, None], bias).softmax(-1)
    weights = F.instance_norm(weights, eps=eps).to(v.dtype)
    return (weights @ values).transpose(1, 2).flatten(2)


def check_mixed(q: Tensor, k: Tensor, v: Tensor, mix: Tensor, heads: int) -> None:
    """Refuse what does not fit together."""
    if k.shape != v.shape or q.shape[::2] != k.shape[::2] or q.shape[2] % heads:
        raise ValueError(
            f"expected queries of [B, n, C], keys and values of [B, n', C] and C divisible by heads={heads}, got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if tuple(mix.shape) != (heads, heads):
        raise ValueError(f"expected weights over heads of {(heads, heads)}, got {tuple(mix.shape)}")


def normalise(attended: Tensor, squares: Tensor, v: Tensor, bias: Tensor, eps: float) -> Tensor:
    """What the instance norm makes of P v.

    Args:
        attended: P v, [B, n, C].
        squares: for every query and head the sum of P², [B, heads, n].
        v: [B, n', C].
        bias: [heads], which changes nothing, but is given its gradient of zero.
    """
    queries, keys = attended.shape[1], v.shape[1]
    variance = squares.sum(-1) / (queries * keys) - 1 / keys**2
    factor = (variance.clamp_min(0) + eps).rsqrt()  # [B, heads]
    average = v.mean(1, dtype=factor.dtype)  # [B, C]
    factor = factor.repeat_interleave(v.shape[2] // len(bias), 1)
    shift = average * factor + 0 * bias.sum()
    return torch.addcmul(-shift[:, None].to(v.dtype), attended, factor[:, None].to(v.dtype))


def _no_objection(*args: Tensor, **options: object) -> str | None:
    return None


@mixed_attention.kernel("affine", _no_objection)
def _affine(
    q: Tensor, k: Tensor, v: Tensor, mix: Tensor, bias: Tensor, *, heads: int, scale: float, eps: float = EPS
) -> Tensor:
    """The same, the mixture in the queries and the norm outside of the map: of all maps only P is stored."""
    check_mixed(q, k, v, mix, heads)
    width = q.shape[2] // heads
    by_channel = (mix * scale).to(q.dtype).repeat_interleave(width, 1)  # [heads, C]
    logits = (q[:, None] * by_channel[:, None]) @ k[:, None].transpose(-2, -1)  # [B, heads, n, n']
    weights = logits.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    squares = weights.square().sum(-1)
    values = v.unflatten(2, (heads, -1)).transpose(1, 2)
    attended = (weights.to(v.dtype) @ values).transpose(1, 2).flatten(2)
    return normalise(attended, squares, v, bias, eps)


@Operation
def attention(q: Tensor, k: Tensor, v: Tensor, *, heads: int, scale: float) -> Tensor:
    """Plain multi-head attention of tokens, softmax(q kᵀ s) v, its map stored. Shapes as in `mixed_attention`."""
    queries, keys, values = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    weights = ((queries @ keys.transpose(-2, -1)) * scale).softmax(-1).to(v.dtype)
    return (weights @ values).transpose(1, 2).flatten(2)


@attention.kernel("fused", _no_objection)
def _fused_attention(q: Tensor, k: Tensor, v: Tensor, *, heads: int, scale: float) -> Tensor:
    """The same by torch's scaled_dot_product_attention."""
    queries, keys, values = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(queries, keys, values, scale=scale).transpose(1, 2).flatten(2)
