"""Every token is given a share of the average token.

Paper: Scratching Visual Transformer's Back with Uniform Attention, ICCV 2023, section 3.2.

    CB    y_i = (x_i + mean over tokens j of x_j) / 2           Eq. 1
    CB_S  y_i = x_i + Λ ⊙ mean over tokens j of x_j

    x      [B, N, C], or [B, H, W, C]
    scale  [C]: Λ; None for CB
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import Operation


def broadcast_context(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """CB of the tokens, or CB_S where a scale is given; the module's docstring says all."""
    if x.dim() < 3:
        raise ValueError(f"expected tokens of [B, N, C] or [B, H, W, C], got {tuple(x.shape)}")
    if scale is not None and tuple(scale.shape) != (x.shape[-1],):
        raise ValueError(f"expected a scale for each of {x.shape[-1]} channels, got {tuple(scale.shape)}")
    return share_average(x, scale)


@Operation
def share_average(x: Tensor, scale: Tensor | None) -> Tensor:
    """The average in one pass over the tokens, the sum in another."""
    return _Broadcast.apply(x) if scale is None else give(x, _average(x), scale)


def give(x: Tensor, average: Tensor, scale: Tensor | None) -> Tensor:
    """Tokens with their share of an average that is given."""
    return torch.lerp(x, average, 0.5) if scale is None else torch.addcmul(x, scale.to(x.dtype), average)


def _average(x: Tensor) -> Tensor:
    return x.mean(tuple(range(1, x.dim() - 1)), keepdim=True)


class _Broadcast(torch.autograd.Function):
    """Eq. 1. It is linear and its matrix symmetric, so gradients go through it as tokens do."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return give(x, _average(x), None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _Broadcast.apply(grad)
