"""Context broadcasting in one kernel. A program holds all tokens of one image and a block of channels.

Both forms are y = a x + w ⊙ mean x, with a = w = 1/2 for CB and a = 1 and w = Λ for CB_S; a = 1 and w = -1 subtracts
the average. The matrix of this map is symmetric, so the gradient of x is the same map applied to the gradient of y. The
gradient of Λ is N times the product of the averages of x and of the gradient of y, summed over the images.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import is_chosen, operation_named
from ..once import once_differentiable
from .runtime import TYPES, pieces, run_kernel, tile, tokens_unsupported_reason

CHANNELS = 64  # channels of a program
MOST_HELD = 256  # tokens that a program holds while it averages; larger numbers are read twice
HALVES, ADDED = (0.5, 0.5), (1.0, 1.0)  # a and w without Λ, for CB and CB_S
LEAST_PROGRAMS = 128  # for images of many tokens: fewer programs would not occupy a GPU


@triton.jit
def _broadcast_kernel(
    x_ptr,  # [batch, tokens, channels], tokens row_stride apart
    scale_ptr,  # [channels]
    output_ptr,  # [batch, tokens, channels]
    average_ptr,  # [batch, channels]
    tokens, channels, row_stride, own_factor, average_factor,
    SCALED: tl.constexpr, HELD: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    n = tl.arange(0, TOKENS)
    row = (image * tokens + n)[:, None]
    x_ptr += row * row_stride + c[None, :]
    output_ptr += row * channels + c[None, :]
    within = (c < channels)[None, :]
    x = tl.load(x_ptr, mask=(n < tokens)[:, None] & within, other=0.0).to(ACC)
    total = tl.sum(x, 0)
    if not HELD:
        for start in range(TOKENS, tokens, TOKENS):
            mask = (start + n < tokens)[:, None] & within
            total += tl.sum(tl.load(x_ptr + start * row_stride, mask=mask, other=0.0).to(ACC), 0)
    average = total / tokens
    tl.store(average_ptr + image * channels + c, average, mask=c < channels)
    context = average * average_factor
    if SCALED:
        context *= tl.load(scale_ptr + c, mask=c < channels, other=0.0).to(ACC)
    y = x * own_factor + context[None, :]
    tl.store(output_ptr, y.to(output_ptr.dtype.element_ty), mask=(n < tokens)[:, None] & within)
    if not HELD:
        for start in range(TOKENS, tokens, TOKENS):
            mask = (start + n < tokens)[:, None] & within
            x = tl.load(x_ptr + start * row_stride, mask=mask, other=0.0).to(ACC)
            y = x * own_factor + context[None, :]
            tl.store(output_ptr + start * channels, y.to(output_ptr.dtype.element_ty), mask=mask)


def _broadcast(x: Tensor, scale: Tensor | None, own_factor: float, average_factor: float) -> tuple[Tensor, Tensor]:
    """Returns own_factor x + average_factor scale ⊙ average, and the average of the tokens of each image."""
    batch, channels = x.shape[0], x.shape[-1]
    tokens = math.prod(x.shape[1:-1])
    held = tile(tokens) <= MOST_HELD
    output = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    accumulate = torch.promote_types(x.dtype, torch.float32)
    average = torch.empty((batch, channels), device=x.device, dtype=accumulate)
    run_kernel(
        _broadcast_kernel, (batch, pieces(channels, CHANNELS)),
        x, x if scale is None else scale.contiguous(), output, average, tokens, channels, x.stride(-2),
        own_factor, average_factor,
        SCALED=scale is not None, HELD=held, TOKENS=tile(tokens) if held else 64, CHANNELS=CHANNELS,
        ACC=TYPES[accumulate], num_warps=8 if held else 4,
    )  # fmt: skip
    return output, average


def subtract_average(x: Tensor) -> Tensor:
    """Subtracts the average token of each image from the tokens, [B, N, C].

    The average is accumulated in float32 or float64.
    """
    return _broadcast(x, None, 1.0, -1.0)[0]


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None) -> Tensor:
        output, average = _broadcast(x, scale, *(HALVES if scale is None else ADDED))
        ctx.save_for_backward(*(() if scale is None else (scale, average)))
        ctx.scaled = scale is not None
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        if ctx.scaled:
            return _scaled_gradients(ctx, grad)
        return operation_named("broadcast_context")(grad.contiguous(), None), None


@once_differentiable
def _scaled_gradients(ctx: Any, grad: Tensor) -> Any:
    scale, average = ctx.saved_tensors
    grad_x, grad_average = _broadcast(grad.contiguous(), scale, *ADDED)
    tokens = math.prod(grad.shape[1:-1])
    return grad_x, (average * grad_average).sum(0).mul_(tokens).to(scale.dtype)


def _leaves_idle(x: Tensor) -> bool:
    """Returns whether a few programs would process many tokens each."""
    programs = x.shape[0] * pieces(x.shape[-1], CHANNELS)
    return math.prod(x.shape[1:-1]) > MOST_HELD and programs < LEAST_PROGRAMS


def unsupported_reason(x: Tensor, scale: Tensor | None) -> str | None:
    reason = tokens_unsupported_reason(x, scale)
    if reason is None and _leaves_idle(x) and not is_chosen("triton"):
        return "for few images of many tokens torch's own kernels are faster"
    return reason


def broadcast_context(x: Tensor, scale: Tensor | None) -> Tensor:
    return _Broadcast.apply(x, scale)
