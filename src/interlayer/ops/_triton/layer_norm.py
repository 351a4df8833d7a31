"""Layer norm in one pass forward and one pass backward, including the gradients of weight and bias.

With n = (x - mean) / sqrt(var + eps), y = n γ + β and g the gradient of y, where means are taken over the channels and
sums over the rows,

    dx = (g γ - mean(g γ) - n mean(g γ n)) / sqrt(var + eps),   dγ = sum of g n,   dβ = sum of g

A program holds entire rows. In the backward pass, a program processes many rows and stores one row of the partial sums,
[PROGRAMS, 2, C], which are added afterwards, so the result does not depend on the order of the programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..autocast import autocast_type
from ..once import once_differentiable
from .runtime import (
    TOKEN_PROGRAMS,
    TYPES,
    pieces,
    run_kernel,
    small_unsupported_reason,
    tile,
    tokens_unsupported_reason,
)

ELEMENTS = 4096  # elements that a program holds at once
MOST_CHANNELS = 4096


@triton.jit
def normalize(x, inside, channels, eps):
    """Returns n of entire rows [ROWS, CHANNELS], 0 outside of the channels, their means and 1 / sqrt(var + eps)."""
    mean = tl.sum(x, 1) / channels
    centered = tl.where(inside[None, :], x - mean[:, None], 0.0)
    inverse_std = 1 / tl.sqrt(tl.sum(centered * centered, 1) / channels + eps)
    return centered * inverse_std[:, None], mean, inverse_std


@triton.jit
def input_gradient(weighted, normed, inverse_std, channels):
    """Returns dx of entire rows, given g γ and n, which are 0 outside of the channels."""
    correlation = tl.sum(weighted * normed, 1) / channels
    average = tl.sum(weighted, 1) / channels
    return (weighted - average[:, None] - normed * correlation[:, None]) * inverse_std[:, None]


@triton.jit
def _norm_kernel(
    x_ptr,  # [rows, channels]
    weight_ptr, bias_ptr,  # [channels]
    output_ptr,  # [rows, channels]
    statistics_ptr,  # [2, rows]: mean, and 1 / sqrt(var + eps)
    rows, channels, eps,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, CHANNELS)
    inside = (row < rows)[:, None] & (c < channels)[None, :]
    places = row[:, None] * channels + c[None, :]
    x = tl.load(x_ptr + places, mask=inside, other=0.0).to(ACC)
    normed, mean, inverse_std = normalize(x, c < channels, channels, eps)
    weight = tl.load(weight_ptr + c, mask=c < channels, other=0.0).to(ACC)
    bias = tl.load(bias_ptr + c, mask=c < channels, other=0.0).to(ACC)
    y = normed * weight[None, :] + bias[None, :]
    tl.store(output_ptr + places, y.to(output_ptr.dtype.element_ty), mask=inside)
    tl.store(statistics_ptr + row, mean, mask=row < rows)
    tl.store(statistics_ptr + rows + row, inverse_std, mask=row < rows)


@triton.jit
def _norm_gradients_kernel(
    x_ptr, weight_ptr, statistics_ptr,  # as above
    grad_ptr,  # [rows, channels]
    grad_x_ptr,  # [rows, channels]
    sums_ptr,  # [programs, 2, channels]: partial sums of the gradients of weight and bias
    rows, channels,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, CHANNELS)
    weight = tl.load(weight_ptr + c, mask=c < channels, other=0.0).to(ACC)
    grad_weight = tl.zeros([ROWS, CHANNELS], ACC)
    grad_bias = tl.zeros([ROWS, CHANNELS], ACC)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (c < channels)[None, :]
        places = row[:, None] * channels + c[None, :]
        x = tl.load(x_ptr + places, mask=inside, other=0.0).to(ACC)
        grad = tl.load(grad_ptr + places, mask=inside, other=0.0).to(ACC)
        mean = tl.load(statistics_ptr + row, mask=row < rows, other=0.0)
        inverse_std = tl.load(statistics_ptr + rows + row, mask=row < rows, other=0.0)
        normed = tl.where(inside, (x - mean[:, None]) * inverse_std[:, None], 0.0)
        grad_weight += grad * normed
        grad_bias += grad
        grad_x = input_gradient(grad * weight[None, :], normed, inverse_std, channels)
        tl.store(grad_x_ptr + places, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
    line = sums_ptr + tl.program_id(0) * 2 * channels + c
    tl.store(line, tl.sum(grad_weight, 0), mask=c < channels)
    tl.store(line + channels, tl.sum(grad_bias, 0), mask=c < channels)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        channels, accumulate = x.shape[-1], torch.promote_types(x.dtype, torch.float32)
        rows = x.numel() // channels
        output = torch.empty(x.shape, device=x.device, dtype=dtype)
        statistics = torch.empty((2, rows), device=x.device, dtype=accumulate)
        sizes = _row_sizes(channels, ELEMENTS)
        run_kernel(
            _norm_kernel, (pieces(rows, sizes["ROWS"]),),
            x, weight, bias, output, statistics, rows, channels, eps, **sizes, ACC=TYPES[accumulate],
        )  # fmt: skip
        ctx.save_for_backward(x, weight, statistics)
        ctx.bias_type = bias.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight, statistics = ctx.saved_tensors
        channels, rows = x.shape[-1], statistics.shape[1]
        sizes = _row_sizes(channels, ELEMENTS // 2)
        programs = min(TOKEN_PROGRAMS, pieces(rows, sizes["ROWS"]))
        grad_x = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        sums = torch.empty((programs, 2, channels), device=x.device, dtype=statistics.dtype)
        run_kernel(
            _norm_gradients_kernel, (programs,),
            x, weight, statistics, grad.contiguous(), grad_x, sums, rows, channels, **sizes, ACC=TYPES[sums.dtype],
        )  # fmt: skip
        grad_weight, grad_bias = sums.sum(0)
        return grad_x, grad_weight.to(weight.dtype), grad_bias.to(ctx.bias_type), None, None


def _row_sizes(channels: int, elements: int) -> dict[str, int]:
    wide = tile(channels)
    return {"ROWS": max(1, elements // wide), "CHANNELS": wide}


def unsupported_reason(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> str | None:
    reason = tokens_unsupported_reason(x, weight, bias)
    if reason is not None:
        return reason
    if x.shape[-1] > MOST_CHANNELS:
        return f"tokens must have at most {MOST_CHANNELS} channels, got {x.shape[-1]}"
    return small_unsupported_reason(x)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _LayerNorm.apply(x, weight.contiguous(), bias.contiguous(), eps, autocast_type(x) or x.dtype)
