"""Backward pass of a feed-forward network: the gradient of GELU and sums over all rows, in one pass.

With the normal distribution function Φ, its density φ and the gradient g of gelu(x),

    gelu(x) = x Φ(x),   dx = g (Φ(x) + x φ(x))

A program processes many rows of a block of columns and stores one row of the partial sums, [PROGRAMS, C], which are
added afterwards, so the result does not depend on the order of the programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .runtime import (
    TOKEN_PROGRAMS,
    TYPES,
    pieces,
    run_kernel,
    small_unsupported_reason,
    tile,
    tokens_unsupported_reason,
)

ELEMENTS = 2048  # elements that a program holds at once
COLUMNS = 128  # columns of a program


@triton.jit
def _sums_kernel(
    x_ptr,  # [rows, channels]
    grad_ptr,  # [rows, channels]: gradient of gelu(x), overwritten by the gradient of x
    activated_ptr,  # [rows, channels]: gelu(x)
    sums_ptr,  # [programs, channels]: partial sums of the gradient of x, or of x itself
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
            cdf = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
            density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
            grad_x = grad * (cdf + x * density)
            tl.store(activated_ptr + places, (x * cdf).to(activated_ptr.dtype.element_ty), mask=inside)
            tl.store(grad_ptr + places, grad_x.to(grad_ptr.dtype.element_ty), mask=inside)
            sums += grad_x
        else:
            sums += x
    tl.store(sums_ptr + tl.program_id(0) * channels + c, tl.sum(sums, 0), mask=c < channels)


def _sums(x: Tensor, grad: Tensor | None = None, activated: Tensor | None = None) -> Tensor:
    """Runs `_sums_kernel`, with the gradient of GELU if `grad` is given, and returns the sums over the rows, [C]."""
    rows, channels = x.shape
    accumulate = torch.promote_types(x.dtype, torch.float32)
    columns = tile(channels, COLUMNS)
    size, across = ELEMENTS // columns, pieces(channels, columns)
    programs = max(1, min(TOKEN_PROGRAMS // across, pieces(rows, size)))
    sums = torch.empty((programs, channels), device=x.device, dtype=accumulate)
    run_kernel(
        _sums_kernel, (programs, across),
        x, x if grad is None else grad, x if activated is None else activated, sums, rows, channels,
        GELU=grad is not None, ROWS=size, COLUMNS=columns, ACC=TYPES[accumulate],
    )  # fmt: skip
    return sums.sum(0)


def unsupported_reason(*tensors: Tensor) -> str | None:
    x = tensors[0]
    reason = tokens_unsupported_reason(*tensors)
    if reason is None and any(not t.is_contiguous() or t.dtype != x.dtype for t in tensors):
        reason = "rows must be contiguous and of one floating-point type"
    return small_unsupported_reason(x) if reason is None else reason


def gelu_gradients(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    activated = torch.empty_like(x)
    return grad, activated, _sums(x, grad, activated)


def column_sums(x: Tensor) -> Tensor:
    return _sums(x)
