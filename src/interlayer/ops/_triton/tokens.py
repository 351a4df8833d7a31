"""Norms and activations of tokens, with the sums over all tokens that their backward passes need, in one pass each.

With n = (x - mean) / sqrt(var + eps), y = n γ + β and g the gradient of y, averages over the channels, sums over the
rows, Φ and φ the normal distribution and its density,

    dx = (g γ - mean(g γ) - n mean(g γ n)) / sqrt(var + eps),   dγ = sum of g n,   dβ = sum of g
    gelu(x) = x Φ(x),   dx = g (Φ(x) + x φ(x))

A program takes some rows whole. Sums over all rows are collected by programs that go through many rows each and leave
one line of [PROGRAMS, C]; the lines are added up behind, so the result does not depend on the programs' order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..autocast import autocast_type
from ..dispatch import asked_for
from ..once import once_differentiable
from ..tokens import column_sums, gelu_gradients, layer_norm
from . import INTERPRETED, TYPES, pieces, run_kernel, tile, why_not_these

ELEMENTS = 4096  # of a program at once
MOST_CHANNELS = 4096  # of a norm
COLUMNS = 128  # of a program that needs no whole rows
LEAST_ELEMENTS = 2**22  # of tokens: torch's own kernels take less time to start
PROGRAMS = 8 if INTERPRETED else 1056  # eight for each multiprocessor of an H200


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
    mean = tl.sum(x, 1) / channels
    off = tl.where((c < channels)[None, :], x - mean[:, None], 0.0)
    spread = 1 / tl.sqrt(tl.sum(off * off, 1) / channels + eps)
    weight = tl.load(weight_ptr + c, mask=c < channels, other=0.0).to(ACC)
    bias = tl.load(bias_ptr + c, mask=c < channels, other=0.0).to(ACC)
    y = off * spread[:, None] * weight[None, :] + bias[None, :]
    tl.store(output_ptr + places, y.to(output_ptr.dtype.element_ty), mask=inside)
    tl.store(statistics_ptr + row, mean, mask=row < rows)
    tl.store(statistics_ptr + rows + row, spread, mask=row < rows)


@triton.jit
def _norm_gradients_kernel(
    x_ptr, weight_ptr, statistics_ptr,  # as above
    grad_ptr,  # [rows, channels]
    grad_x_ptr,  # [rows, channels]
    sums_ptr,  # [programs, 2, channels]: of the weight's and the bias's gradient
    rows, channels,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, CHANNELS)
    weight = tl.load(weight_ptr + c, mask=c < channels, other=0.0).to(ACC)
    of_weight = tl.zeros([ROWS, CHANNELS], ACC)
    of_bias = tl.zeros([ROWS, CHANNELS], ACC)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (c < channels)[None, :]
        places = row[:, None] * channels + c[None, :]
        x = tl.load(x_ptr + places, mask=inside, other=0.0).to(ACC)
        grad = tl.load(grad_ptr + places, mask=inside, other=0.0).to(ACC)
        mean = tl.load(statistics_ptr + row, mask=row < rows, other=0.0)
        spread = tl.load(statistics_ptr + rows + row, mask=row < rows, other=0.0)
        normed = tl.where(inside, (x - mean[:, None]) * spread[:, None], 0.0)
        of_weight += grad * normed
        of_bias += grad
        weighted = grad * weight[None, :]
        along = tl.sum(weighted * normed, 1) / channels
        level = tl.sum(weighted, 1) / channels
        grad_x = (weighted - level[:, None] - normed * along[:, None]) * spread[:, None]
        tl.store(grad_x_ptr + places, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
    line = sums_ptr + tl.program_id(0) * 2 * channels + c
    tl.store(line, tl.sum(of_weight, 0), mask=c < channels)
    tl.store(line + channels, tl.sum(of_bias, 0), mask=c < channels)


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
        programs = min(PROGRAMS, pieces(rows, sizes["ROWS"]))
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


def _objection_to_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> str | None:
    objection = why_not_these(x, weight, bias)
    if objection is not None:
        return objection
    if x.shape[-1] > MOST_CHANNELS:
        return f"tokens must have at most {MOST_CHANNELS} channels, got {x.shape[-1]}"
    return _why_not_worth_it(x)


def _why_not_worth_it(x: Tensor) -> str | None:
    if x.numel() < LEAST_ELEMENTS and not asked_for("triton"):
        return f"for less than {LEAST_ELEMENTS} elements torch's own kernels are as fast"
    return None


@layer_norm.kernel("triton", _objection_to_norm)
def _fused_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _LayerNorm.apply(x, weight.contiguous(), bias.contiguous(), eps, autocast_type(x) or x.dtype)


@triton.jit
def _sums_kernel(
    x_ptr,  # [rows, channels]
    grad_ptr,  # [rows, channels]: of gelu(x), overwritten by that of x
    activated_ptr,  # [rows, channels]: gelu(x)
    sums_ptr,  # [programs, channels]: of the gradient of x, or of x itself
    rows, channels,
    GELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], ACC)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (c < channels)[None, :]
        places = row[:, None] * channels + c[None, :]
        x = tl.load(x_ptr + places, mask=inside, other=0.0).to(ACC)
        if GELU:
            grad = tl.load(grad_ptr + places, mask=inside, other=0.0).to(ACC)
            below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
            density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
            grad_x = grad * (below + x * density)
            tl.store(activated_ptr + places, (x * below).to(activated_ptr.dtype.element_ty), mask=inside)
            tl.store(grad_ptr + places, grad_x.to(grad_ptr.dtype.element_ty), mask=inside)
            sums += grad_x
        else:
            sums += x
    tl.store(sums_ptr + tl.program_id(0) * channels + c, tl.sum(sums, 0), mask=c < channels)


def _sums(x: Tensor, grad: Tensor | None = None, activated: Tensor | None = None) -> Tensor:
    """[C]: what `_sums_kernel` adds up, with the activation where its tensors are given."""
    rows, channels = x.shape
    accumulate = torch.promote_types(x.dtype, torch.float32)
    columns = tile(channels, COLUMNS)
    size, across = ELEMENTS // 2 // columns, pieces(channels, columns)
    programs = max(1, min(PROGRAMS // across, pieces(rows, size)))
    sums = torch.empty((programs, channels), device=x.device, dtype=accumulate)
    run_kernel(
        _sums_kernel, (programs, across),
        x, x if grad is None else grad, x if activated is None else activated, sums, rows, channels,
        GELU=grad is not None, ROWS=size, COLUMNS=columns, ACC=TYPES[accumulate],
    )  # fmt: skip
    return sums.sum(0)


def _objection_to_rows(*tensors: Tensor) -> str | None:
    x = tensors[0]
    objection = why_not_these(*tensors)
    if objection is None and any(not t.is_contiguous() or t.dtype != x.dtype for t in tensors):
        objection = "rows must be of one floating-point type and lie one after another"
    return _why_not_worth_it(x) if objection is None else objection


# Steps of a backward pass, which may run where another implementation was asked for: these do not insist.
@gelu_gradients.kernel("triton", _objection_to_rows, insists=False)
def _fused_gelu_gradients(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    activated = torch.empty_like(x)
    return grad, activated, _sums(x, grad, activated)


@column_sums.kernel("triton", _objection_to_rows, insists=False)
def _fused_column_sums(x: Tensor) -> Tensor:
    return _sums(x)
