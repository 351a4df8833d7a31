"""Kernels of batch norm that the kernels of a block's end share: statistics, their table, and gradients.

Statistics are combined from those of several programs, each of which stores for its pixels and each channel

    moments   [splits, 3, C]: the number of pixels n, their mean m and the sum M of squared differences from it

by Chan's formula, mean = sum of n m / N, variance = sum of (M + n (m - mean)²) / N, which does not cancel if the mean
is large. What the other kernels read of a norm is one table:

    table     [4, C]: mean, 1 / std, scale = gamma / std, shift = beta - mean scale

Running statistics are updated by the kernel that computes the table. An operator that may not change its arguments
passes none, and gets the variance as a fifth row of the table, from which `update_statistics` updates them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..once import once_differentiable
from ..residual_end import BatchNormArguments
from .light_layer_parts import program_and_channels
from .runtime import INTERPRETED, TYPES, pieces, power_of_2, run_kernel

SPLITS = 32 if INTERPRETED else 128  # partial sums that are added at once
SUM_CHANNELS = 16  # channels of which a program adds such sums
ROWS = 32  # pixels that a program holds at once
CHANNELS = 64  # channels that a program holds at once
STAGES = 4  # tiles that are loaded ahead
PROGRAMS = 8 if INTERPRETED else 528  # of a reduction: four for each of the 132 multiprocessors of an H200


@triton.jit
def store_moments(moments_ptr, split, columns, inside, channels, count, pivot, total, squares):
    """Stores the moments of one program, given the sums of x - pivot and of its square."""
    mean = total / count
    start = moments_ptr + split * 3 * channels + columns
    tl.store(start, tl.zeros_like(mean) + count, mask=inside)
    tl.store(start + channels, pivot + mean, mask=inside)
    tl.store(start + 2 * channels, tl.maximum(squares - total * mean, 0.0), mask=inside)


@triton.jit
def _moments_kernel(
    x_ptr,  # [rows, channels]
    moments_ptr,  # [splits, 3, channels]
    rows,
    channels,
    rows_per_split,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    program, columns = program_and_channels(channels, CHANNELS)
    inside = columns < channels
    split = program.to(tl.int64)
    first = split * rows_per_split
    number = tl.minimum(rows - first, rows_per_split).to(tl.int32)
    x_ptr += first * channels
    pivot = tl.load(x_ptr + columns, mask=inside, other=0.0).to(ACC)
    total = tl.zeros([ROWS, CHANNELS], ACC)
    squares = tl.zeros([ROWS, CHANNELS], ACC)
    for start in tl.range(0, number, ROWS, num_stages=STAGES):
        lines = start + tl.arange(0, ROWS)
        mask = (lines < number)[:, None] & inside[None, :]
        value = tl.load(x_ptr + lines[:, None] * channels + columns[None, :], mask=mask, other=0.0).to(ACC)
        value = tl.where(mask, value - pivot[None, :], 0.0)
        total += value
        squares += value * value
    store_moments(
        moments_ptr, split, columns, inside, channels, number.to(ACC), pivot,
        tl.sum(total, 0), tl.sum(squares, 0),
    )  # fmt: skip


@triton.jit
def _batch_table_kernel(
    moments_ptr,  # [splits, 3, channels]
    gamma_ptr,  # [channels]
    beta_ptr,  # [channels]
    running_mean_ptr,  # [channels]
    running_var_ptr,  # [channels]
    table_ptr,  # [4, channels], or [5, channels] if nothing is updated
    rows,
    channels,
    splits,
    eps,
    momentum,
    unbias,
    UPDATE: tl.constexpr,
    SPLITS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    columns = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = columns < channels
    total = tl.zeros([SPLITS, CHANNELS], ACC)
    for start in range(0, splits, SPLITS):
        lines = start + tl.arange(0, SPLITS)
        mask = (lines < splits)[:, None] & inside[None, :]
        places = moments_ptr + lines[:, None] * 3 * channels + columns[None, :]
        total += tl.load(places, mask=mask, other=0.0) * tl.load(places + channels, mask=mask, other=0.0)
    mean = tl.sum(total, 0) / rows
    total = tl.zeros([SPLITS, CHANNELS], ACC)
    for start in range(0, splits, SPLITS):
        lines = start + tl.arange(0, SPLITS)
        mask = (lines < splits)[:, None] & inside[None, :]
        places = moments_ptr + lines[:, None] * 3 * channels + columns[None, :]
        difference = tl.load(places + channels, mask=mask, other=0.0) - mean[None, :]
        total += tl.load(places + 2 * channels, mask=mask, other=0.0)
        total += tl.load(places, mask=mask, other=0.0) * difference * difference
    variance = tl.sum(total, 0) / rows
    store_table(table_ptr, gamma_ptr, beta_ptr, columns, inside, channels, mean, variance, eps, ACC)
    if UPDATE:
        moving = tl.load(running_mean_ptr + columns, mask=inside, other=0.0).to(ACC)
        moving += (mean - moving) * momentum
        tl.store(running_mean_ptr + columns, moving.to(running_mean_ptr.dtype.element_ty), mask=inside)
        moving = tl.load(running_var_ptr + columns, mask=inside, other=0.0).to(ACC)
        moving += (variance * unbias - moving) * momentum
        tl.store(running_var_ptr + columns, moving.to(running_var_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(table_ptr + 4 * channels + columns, variance, mask=inside)


@triton.jit
def running_statistics(mean_ptr, variance_ptr, columns, inside, ACC: tl.constexpr):
    """Returns the running mean and variance of the given channels."""
    mean = tl.load(mean_ptr + columns, mask=inside, other=0.0).to(ACC)
    return mean, tl.load(variance_ptr + columns, mask=inside, other=1.0).to(ACC)


@triton.jit
def scale_and_shift(gamma_ptr, beta_ptr, columns, inside, mean, variance, eps, ACC: tl.constexpr):
    """Returns scale and shift of a norm with the given statistics."""
    scale = tl.load(gamma_ptr + columns, mask=inside, other=0.0).to(ACC) / tl.sqrt(variance + eps)
    return scale, tl.load(beta_ptr + columns, mask=inside, other=0.0).to(ACC) - mean * scale


@triton.jit
def store_table(table_ptr, gamma_ptr, beta_ptr, columns, inside, channels, mean, variance, eps, ACC: tl.constexpr):
    """Stores the table of a norm with the given statistics."""
    scale, shift = scale_and_shift(gamma_ptr, beta_ptr, columns, inside, mean, variance, eps, ACC)
    tl.store(table_ptr + columns, mean, mask=inside)
    tl.store(table_ptr + channels + columns, 1.0 / tl.sqrt(variance + eps), mask=inside)
    tl.store(table_ptr + 2 * channels + columns, scale, mask=inside)
    tl.store(table_ptr + 3 * channels + columns, shift, mask=inside)


@triton.jit
def _running_table_kernel(
    gamma_ptr,  # [channels]
    beta_ptr,  # [channels]
    running_mean_ptr,  # [channels]
    running_var_ptr,  # [channels]
    table_ptr,  # [4, channels]
    channels,
    eps,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    columns = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = columns < channels
    mean, variance = running_statistics(running_mean_ptr, running_var_ptr, columns, inside, ACC)
    store_table(table_ptr, gamma_ptr, beta_ptr, columns, inside, channels, mean, variance, eps, ACC)


@triton.jit
def sum_of_splits(
    partial_ptr,  # [splits, kinds, channels]
    kind,
    columns,
    inside,
    channels,
    splits,
    kinds,
    SPLITS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Returns the sum over the splits of one kind, at the given channels."""
    total = tl.zeros([SPLITS, CHANNELS], ACC)
    for start in range(0, splits, SPLITS):
        lines = start + tl.arange(0, SPLITS)
        mask = (lines < splits)[:, None] & inside[None, :]
        places = (lines[:, None] * kinds + kind) * channels + columns[None, :]
        total += tl.load(partial_ptr + places, mask=mask, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _sums_kernel(
    partial_ptr,  # [splits, kinds, channels]
    sums_ptr,  # [kinds, channels]
    channels,
    splits,
    kinds,
    SPLITS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    kind = tl.program_id(1)
    columns = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = columns < channels
    total = sum_of_splits(partial_ptr, kind, columns, inside, channels, splits, kinds, SPLITS, CHANNELS, ACC)
    tl.store(sums_ptr + kind * channels + columns, total, mask=inside)


@triton.jit
def _reduce_kernel(
    grad_ptr,  # [batch * pixels, channels]: g, the gradient of the output
    output_ptr,  # [batch * pixels, channels]: the input O of the norm
    table_ptr,  # [4, channels]
    mask_ptr,  # [batch]: m, the factor of each sample
    sums_ptr,  # [splits, 2, channels]: sums of m g and of m g O^
    total_pixels,
    pixels,
    pixels_per_split,
    channels,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    program, columns = program_and_channels(channels, CHANNELS)
    inside = columns < channels
    split = program.to(tl.int64)
    first = split * pixels_per_split
    number = tl.minimum(total_pixels - first, pixels_per_split).to(tl.int32)
    grad_ptr += first * channels
    output_ptr += first * channels
    mean = tl.load(table_ptr + columns, mask=inside, other=0.0)
    inverse_std = tl.load(table_ptr + channels + columns, mask=inside, other=0.0)
    total = tl.zeros([PIXELS, CHANNELS], ACC)
    correlated = tl.zeros([PIXELS, CHANNELS], ACC)
    for pixel in tl.range(0, number, PIXELS, num_stages=STAGES):
        lines = pixel + tl.arange(0, PIXELS)
        mask = (lines < number)[:, None] & inside[None, :]
        places = lines[:, None] * channels + columns[None, :]
        grad = tl.load(grad_ptr + places, mask=mask, other=0.0).to(ACC)
        output = tl.load(output_ptr + places, mask=mask, other=0.0).to(ACC)
        if MASKED:
            grad *= tl.load(mask_ptr + (first + lines) // pixels, mask=lines < number, other=0.0).to(ACC)[:, None]
        total += grad
        correlated += grad * (output - mean[None, :])
    start = sums_ptr + split * 2 * channels + columns
    tl.store(start, tl.sum(total, 0), mask=inside)
    tl.store(start + channels, tl.sum(correlated, 0) * inverse_std, mask=inside)


@triton.jit
def _affine_kernel(
    x_ptr,  # [rows, channels]
    grad_ptr,  # [rows, channels]: gradient of the output
    table_ptr,  # [4, channels]
    sums_ptr,  # [2, channels]: sums of the gradient and of its product with the normalized input
    result_ptr,  # [rows, channels]: the output, or the gradient of the input
    rows,
    channels,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    program, columns = program_and_channels(channels, CHANNELS)
    inside = columns < channels
    lines = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (lines < rows)[:, None] & inside[None, :]
    places = lines[:, None] * channels + columns[None, :]
    x = tl.load(x_ptr + places, mask=mask, other=0.0).to(ACC)
    scale = tl.load(table_ptr + 2 * channels + columns, mask=inside, other=0.0)
    shift = tl.load(table_ptr + 3 * channels + columns, mask=inside, other=0.0)
    if BACKWARD:
        mean = tl.load(table_ptr + columns, mask=inside, other=0.0)
        inverse_std = tl.load(table_ptr + channels + columns, mask=inside, other=0.0)
        average = tl.load(sums_ptr + columns, mask=inside, other=0.0) / rows
        correlated = tl.load(sums_ptr + channels + columns, mask=inside, other=0.0) / rows
        grad = tl.load(grad_ptr + places, mask=mask, other=0.0).to(ACC)
        normalized = (x - mean[None, :]) * inverse_std[None, :]
        result = (grad - average[None, :] - normalized * correlated[None, :]) * scale[None, :]
    else:
        result = x * scale[None, :] + shift[None, :]
    tl.store(result_ptr + places, result.to(result_ptr.dtype.element_ty), mask=mask)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *norm_arguments: Any) -> tuple[Tensor, Tensor]:
        norm = BatchNormArguments(*norm_arguments)  # autograd does not look into tuples, so they are passed one by one
        table = batch_table(moments_of(x), norm, x.numel() // x.shape[1])
        ctx.save_for_backward(x, table)
        ctx.dtypes = norm.weight.dtype, norm.bias.dtype
        ctx.mark_non_differentiable(table)
        ctx.set_materialize_grads(False)
        return _affine(x, x, table, table, backward=False), table

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> Any:  # type: ignore[override]
        x, table = ctx.saved_tensors
        others = (None,) * (len(BatchNormArguments._fields) - 2)
        if grad is None:
            return None, None, None, *others
        grad = grad.to(x.dtype).contiguous(memory_format=torch.channels_last)
        sums = gradient_sums(grad, x, table)
        grad_x = _affine(x, grad, table, sums, backward=True)
        return grad_x, sums[1].to(ctx.dtypes[0]), sums[0].to(ctx.dtypes[1]), *others


def batch_norm(x: Tensor, norm: BatchNormArguments) -> tuple[Tensor, Tensor]:
    """Returns BN(x) of a channels_last map for a norm in training, and its table, from which it can be computed again.

    The running statistics are updated in place.
    """
    return _BatchNorm.apply(x, *norm)


def gradient_sums(grad: Tensor, x: Tensor, table: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns the sums over all pixels of m g and of m g x^, [2, C], with x^ the normalized x and m = 1 by default."""
    batch, channels, height, width = x.shape
    rows, block = batch * height * width, _channel_block(channels)
    size = _rows_of_split(rows, channels, block)
    splits = pieces(rows, size)
    sums = torch.empty((splits, 2, channels), device=x.device, dtype=table.dtype)
    run_kernel(
        _reduce_kernel, (splits * pieces(channels, block),),
        grad, x, table, table if mask is None else mask, sums, rows, height * width, size, channels,
        MASKED=mask is not None, STAGES=STAGES, PIXELS=ROWS, CHANNELS=block, ACC=TYPES[table.dtype],
    )  # fmt: skip
    return sums_of_splits(sums)


def _affine(x: Tensor, grad: Tensor, table: Tensor, sums: Tensor, *, backward: bool) -> Tensor:
    channels = x.shape[1]
    rows, block = x.numel() // channels, _channel_block(channels)
    result = torch.empty_like(x)
    run_kernel(
        _affine_kernel, (pieces(rows, ROWS) * pieces(channels, block),),
        x, grad, table, sums, result, rows, channels,
        BACKWARD=backward, ROWS=ROWS, CHANNELS=block, ACC=TYPES[table.dtype],
    )  # fmt: skip
    return result


def _rows_of_split(rows: int, channels: int, block: int) -> int:
    """Returns the number of pixels of one part in a sum over all pixels."""
    blocks = pieces(rows, ROWS)
    least = pieces(rows * channels, 2**30)  # so that offsets of 32 bits suffice within a part
    return ROWS * pieces(blocks, max(least, min(blocks, PROGRAMS // pieces(channels, block))))


def accumulator(x: Tensor) -> torch.dtype:
    """Returns the dtype in which statistics of x are accumulated."""
    return torch.promote_types(x.dtype, torch.float32)


def moments_of(x: Tensor) -> Tensor:
    """Returns the moments of a channels_last map, [splits, 3, C]."""
    batch, channels, height, width = x.shape
    rows, block = batch * height * width, _channel_block(channels)
    rows_per_split = _rows_of_split(rows, channels, block)
    splits = pieces(rows, rows_per_split)
    moments = torch.empty((splits, 3, channels), device=x.device, dtype=accumulator(x))
    run_kernel(
        _moments_kernel, (splits * pieces(channels, block),), x, moments, rows, channels, rows_per_split,
        STAGES=STAGES, ROWS=ROWS, CHANNELS=block, ACC=TYPES[moments.dtype],
    )  # fmt: skip
    return moments


def batch_table(moments: Tensor, norm: BatchNormArguments, rows: int) -> Tensor:
    """Returns the table of a norm in training, and updates its running statistics.

    If they are None, the table has a fifth row with the variance instead.
    """
    splits, _, channels = moments.shape
    update = norm.running_mean is not None
    table = torch.empty((4 if update else 5, channels), device=moments.device, dtype=moments.dtype)
    tensors = norm.tensors if update else (norm.weight, norm.bias, table, table)
    run_kernel(
        _batch_table_kernel, (pieces(channels, SUM_CHANNELS),),
        moments, *tensors, table, rows, channels, splits, norm.eps, norm.momentum, rows / max(1, rows - 1),
        UPDATE=update, SPLITS=SPLITS, CHANNELS=SUM_CHANNELS, ACC=TYPES[moments.dtype],
    )  # fmt: skip
    return table


def operator_tensors(norm: BatchNormArguments) -> tuple[Tensor | None, ...]:
    """Returns the tensors of a norm for an operator that may not change its arguments."""
    return (norm.weight, norm.bias, None, None) if norm.training else norm.tensors


def update_statistics(norm: BatchNormArguments, table: Tensor, x: Tensor) -> None:
    """Updates the running statistics of a norm in training from the table of x with a row for the variance."""
    if not norm.training:
        return
    rows = x.numel() // x.shape[1]
    with torch.no_grad():
        mean, variance = table[0], table[4] * (rows / (rows - 1))
        norm.running_mean.add_((mean - norm.running_mean) * norm.momentum)
        norm.running_var.add_((variance - norm.running_var) * norm.momentum)


def running_table(norm: BatchNormArguments, dtype: torch.dtype) -> Tensor:
    """Returns the table of a norm that uses its running statistics."""
    channels = len(norm.weight)
    table = torch.empty((4, channels), device=norm.weight.device, dtype=dtype)
    block = _channel_block(channels)
    run_kernel(
        _running_table_kernel, (pieces(channels, block),),
        *norm.tensors, table, channels, norm.eps, CHANNELS=block, ACC=TYPES[dtype],
    )  # fmt: skip
    return table


def sums_of_splits(partial: Tensor) -> Tensor:
    """Returns the sum over the first dimension of [splits, kinds, C]."""
    splits, kinds, channels = partial.shape
    sums = torch.empty((kinds, channels), device=partial.device, dtype=partial.dtype)
    run_kernel(
        _sums_kernel, (pieces(channels, SUM_CHANNELS), kinds), partial, sums, channels, splits, kinds,
        SPLITS=SPLITS, CHANNELS=SUM_CHANNELS, ACC=TYPES[partial.dtype],
    )  # fmt: skip
    return sums


def _channel_block(channels: int) -> int:
    return min(CHANNELS, max(16, power_of_2(channels)))
