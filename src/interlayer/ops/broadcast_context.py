"""Context broadcasting (CB): adds the average token to every token.

Paper: Scratching Visual Transformer's Back with Uniform Attention, ICCV 2023, section 3.2.

    CB    y_i = (x_i + mean over tokens j of x_j) / 2           Eq. 1
    CB_S  y_i = x_i + Λ ⊙ mean over tokens j of x_j

    x      [B, N, C], or [B, H, W, C]
    scale  [C]: Λ, or None for CB
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import Operation, triton_implementation


def broadcast_context(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Computes CB, or CB_S if a scale is given.

    See the module docstring for the equations.

    Args:
        x: Tokens, [B, N, C] or [B, H, W, C].
        scale: Λ, [C], or None for CB.
    """
    if x.dim() < 3:
        raise ValueError(f"expected tokens of [B, N, C] or [B, H, W, C], got {tuple(x.shape)}")
    if scale is not None and tuple(scale.shape) != (x.shape[-1],):
        raise ValueError(f"expected a scale for each of {x.shape[-1]} channels, got {tuple(scale.shape)}")
    return broadcast_context_operation(x, scale)


def _reference(x: Tensor, scale: Tensor | None) -> Tensor:
    """Averages the tokens in one pass and adds the average in a second pass."""
    return _Broadcast.apply(x) if scale is None else add_average(x, _average(x), scale)


def add_average(x: Tensor, average: Tensor, scale: Tensor | None) -> Tensor:
    """Combines tokens with their precomputed average: CB, or CB_S if a scale is given."""
    return torch.lerp(x, average, 0.5) if scale is None else torch.addcmul(x, scale.to(x.dtype), average)


def _average(x: Tensor) -> Tensor:
    return x.mean(tuple(range(1, x.dim() - 1)), keepdim=True)


class _Broadcast(torch.autograd.Function):
    """Computes Eq. 1. The map is linear and its matrix is symmetric, so the backward pass is the same map."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return add_average(x, _average(x), None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _Broadcast.apply(grad)


broadcast_context_operation = Operation("broadcast_context", _reference, triton_implementation("broadcast_context"))
