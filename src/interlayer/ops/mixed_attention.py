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

    o_j = r_j P_j (v_j - mean over the keys of v_j),   r_j = (sum P_j² / (n n') - 1 / n'² + eps)^(-1/2)

and bias_j, the same for a whole row, changes nothing: its gradient is zero. The mean is taken off the values and not
off P v: r can be in the hundreds, and would make the rounding of P v that much larger.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import Operation

EPS = 1e-5  # of the instance norm


def mixed_attention(
    q: Tensor, k: Tensor, v: Tensor, mix: Tensor, bias: Tensor, *, heads: int, scale: float, eps: float = EPS
) -> Tensor:
    """Attention with mixed and normalised heads; the module's docstring says all.

    Args:
        q, k, v: tokens, [B, n, C], [B, n', C] and [B, n', C].
        mix, bias: of the 1x1 convolution over heads, [heads, heads] and [heads].
        heads: number of heads.
        scale: s.
        eps: of the instance norm.
    """
    _check(q, k, v, heads)
    if tuple(mix.shape) != (heads, heads) or tuple(bias.shape) != (heads,):
        raise ValueError(
            f"expected weights and bias over heads of {(heads, heads)} and {(heads,)}, got {tuple(mix.shape)} and "
            f"{tuple(bias.shape)}"
        )
    return attend_mixed(q, k, v, mix, bias, heads, scale, eps)


@partial(Operation, name="mixed_attention")
def attend_mixed(
    q: Tensor, k: Tensor, v: Tensor, mix: Tensor, bias: Tensor, heads: int, scale: float, eps: float
) -> Tensor:
    """The published arrangement: one operation after another, every map stored."""
    queries, keys, values = _by_head(q, k, v, heads)
    scores = (queries @ keys.transpose(-2, -1)) * scale
    weights = F.conv2d(scores, mix[..., None, None], bias).softmax(-1)
    one_value = weights.shape[2] * weights.shape[3] == 1  # which torch's norm refuses: it has no spread
    weights = weights * 0 if one_value else F.instance_norm(weights, eps=eps)
    return (weights.to(v.dtype) @ values).transpose(1, 2).flatten(2)


def _by_head(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Iterator[Tensor]:
    """[B, heads, ., d] of each."""
    return (x.view(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2) for x in (q, k, v))


def _check(q: Tensor, k: Tensor, v: Tensor, heads: int) -> None:
    """Refuse what does not fit together."""
    fits = q.dim() == k.dim() == 3 and k.shape == v.shape and q.shape[::2] == k.shape[::2]
    if heads < 1 or not fits or q.shape[2] % heads:
        raise ValueError(
            f"expected queries of [B, n, C], keys and values of [B, n', C] and C divisible by heads={heads}, got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )


def centred(v: Tensor) -> Tensor:
    """Values less their mean over the keys, in which float32 has a part."""
    wide = v.to(torch.promote_types(v.dtype, torch.float32))
    return (wide - wide.mean(1, keepdim=True)).to(v.dtype)


def normalise(attended: Tensor, squares: Tensor, keys: int, bias: Tensor, eps: float) -> Tensor:
    """What the instance norm makes of P times the centred values.

    Args:
        attended: that product, [B, n, C].
        squares: for every query and head the sum of P², [B, heads, n].
        keys: n'.
        bias: [heads], which changes nothing, but is given its gradient of zero.
    """
    heads, queries = squares.shape[1:]
    variance = squares.sum(-1) / (queries * keys) - 1 / keys**2
    factor = (variance.clamp_min(0) + eps).rsqrt() + 0 * bias  # [B, heads]
    return attended * factor.repeat_interleave(attended.shape[2] // heads, 1)[:, None].to(attended.dtype)


def _no_objection(*args: object, **options: object) -> str | None:
    return None


@attend_mixed.kernel("affine", _no_objection)
def _affine(q: Tensor, k: Tensor, v: Tensor, mix: Tensor, bias: Tensor, heads: int, scale: float, eps: float) -> Tensor:
    """The same with the norm outside of the map: neither S' nor A is stored."""
    queries, keys, values = _by_head(q, k, centred(v), heads)
    scores = queries @ keys.transpose(-2, -1)
    mixed = torch.einsum("ji,binm->bjnm", (mix * scale).to(scores.dtype), scores)
    weights = mixed.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    squares = weights.square().sum(-1)
    attended = (weights.to(v.dtype) @ values).transpose(1, 2).flatten(2)
    return normalise(attended, squares, k.shape[1], bias, eps)


def attention(q: Tensor, k: Tensor, v: Tensor, *, heads: int, scale: float) -> Tensor:
    """Plain multi-head attention of tokens, softmax(q kᵀ s) v. Shapes as in `mixed_attention`."""
    _check(q, k, v, heads)
    return attend_plainly(q, k, v, heads, scale)


@partial(Operation, name="attention")
def attend_plainly(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    """Its map stored."""
    queries, keys, values = _by_head(q, k, v, heads)
    weights = ((queries @ keys.transpose(-2, -1)) * scale).softmax(-1).to(v.dtype)
    return (weights @ values).transpose(1, 2).flatten(2)


@attend_plainly.kernel("fused", _no_objection)
def _fused_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    """The same by torch's scaled_dot_product_attention."""
    queries, keys, values = _by_head(q, k, v, heads)
    return F.scaled_dot_product_attention(queries, keys, values, scale=scale).transpose(1, 2).flatten(2)
