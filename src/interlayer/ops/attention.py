"""Multi-head attention over tokens.

o_i = softmax(q_i k_iᵀ s) v_i       for each head i

q        [B, n, heads d]     tokens; the channels of a head are contiguous
k, v     [B, n', heads d]
result   [B, n, heads d]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from .dispatch import Implementation, Operation


def attention(q: Tensor, k: Tensor, v: Tensor, *, heads: int, scale: float) -> Tensor:
    """Computes multi-head attention.

    See the module docstring for the equation.

    Args:
        q: Queries, [B, n, C].
        k: Keys, [B, n', C].
        v: Values, [B, n', C].
        heads: The number of heads.
        scale: The factor s of the scores.
    """
    check_tokens(q, k, v, heads)
    return attention_operation(q, k, v, heads, scale)


def check_tokens(q: Tensor, k: Tensor, v: Tensor, heads: int) -> None:
    """Raises a ValueError if the shapes are inconsistent."""
    fits = q.dim() == k.dim() == 3 and k.shape == v.shape and q.shape[::2] == k.shape[::2]
    if heads < 1 or not fits or q.shape[2] % heads:
        raise ValueError(
            f"expected queries of [B, n, C], keys and values of [B, n', C] and C divisible by heads={heads}, got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )


def split_heads(*tensors: Tensor, heads: int) -> Iterator[Tensor]:
    """Reshapes queries, keys or values [B, n, heads d] to [B, heads, n, d]."""
    return (x.view(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2) for x in tensors)


def _reference(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    """Stores the attention map."""
    queries, keys, values = split_heads(q, k, v, heads=heads)
    weights = ((queries @ keys.transpose(-2, -1)) * scale).softmax(-1).to(v.dtype)
    return (weights @ values).transpose(1, 2).flatten(2)


def _fused(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    """Calls :func:`torch.nn.functional.scaled_dot_product_attention`."""
    queries, keys, values = split_heads(q, k, v, heads=heads)
    return F.scaled_dot_product_attention(queries, keys, values, scale=scale).transpose(1, 2).flatten(2)


def _unsupported_reason(*args: object) -> str | None:
    return None


attention_operation = Operation("attention", _reference, [Implementation("fused", _fused, _unsupported_reason)])
