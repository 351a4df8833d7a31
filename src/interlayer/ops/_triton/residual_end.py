"""Fused batch norm, addition, ReLU and projection at the end of a residual block.

The pixels are N rows of C channels. With y = (x - mean) / std * gamma + beta, the forward pass runs the kernels

    statistics   sums of x and x² per channel                                                        reads x
    normalizer   mean and 1 / std, scale and shift with gamma and beta, the running statistics
    end          x' = ReLU(y + s), p = y Wᵀ                                             reads x, s; writes x', p

and the backward pass, for the gradients g of x' and dp of p, with ds = g where x' > 0 and dy = ds + dp W,

    reduce       ds; sums of dy and dy y^ per channel, dW = dpᵀ y                   reads g, x', x, dp; writes ds
    gradients    those of gamma, beta and W, from the sums of the programs
    input        dx = (dy - mean(dy) - y^ mean(dy y^)) gamma / std                      reads ds, x, dp; writes dx

y and dy are never stored. The forward pass takes three passes over the map and the backward pass seven; cuDNN and the
elementwise kernels of eager PyTorch take eight and nine.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import TRACED, is_chosen
from ..residual_end import BatchNormArguments
from ..residual_end import unsupported_reason as shared_unsupported_reason
from .batch_norm import operator_tensors, update_statistics
from .runtime import (
    TYPES,
    DifferentiableOperator,
    device_unsupported_reason,
    is_channels_last,
    is_compiled,
    number_types,
    pieces,
    run_kernel,
    tile,
)

ROWS = 64  # pixels that a program holds at once
CHANNELS = 64  # channels that a program holds at once
SPLITS = 32  # partial sums that are added at once
PROGRAMS = 1056  # of a reduction: eight for each of the 132 multiprocessors of an H200
MOST_STATE_CHANNELS = 128
COMPILED = False  # whether torch.compile uses the kernels without being asked to


@triton.jit
def _statistics_kernel(
    x_ptr,  # [rows, channels]
    sums_ptr,  # [splits, 2, channels]: of x - x[0] and of its square, which prevents cancellation if the mean is large
    rows,
    channels,
    splits,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    split = tl.program_id(1)
    columns = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = columns < channels
    pivot = tl.load(x_ptr + columns, mask=inside, other=0.0).to(ACC)
    total = tl.zeros([CHANNELS], ACC)
    squares = tl.zeros([CHANNELS], ACC)
    for start in range(split * ROWS, rows, splits * ROWS):
        lines = start + tl.arange(0, ROWS)
        mask = (lines < rows)[:, None] & inside[None, :]
        places = lines.to(tl.int64)[:, None] * channels + columns[None, :]
        value = tl.load(x_ptr + places, mask=mask, other=0.0).to(ACC)
        value = tl.where(mask, value - pivot[None, :], 0.0)
        total += tl.sum(value, 0)
        squares += tl.sum(value * value, 0)
    tl.store(sums_ptr + (split * 2) * channels + columns, total, mask=inside)
    tl.store(sums_ptr + (split * 2 + 1) * channels + columns, squares, mask=inside)


@triton.jit
def _sum_of_splits(
    partial_ptr,  # [splits, stride]: `columns` are summed over the rows
    columns,
    inside,
    splits,
    stride,
    SPLITS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    total = tl.zeros([CHANNELS], ACC)
    for start in range(0, splits, SPLITS):
        rows = start + tl.arange(0, SPLITS)
        mask = (rows < splits)[:, None] & inside[None, :]
        total += tl.sum(tl.load(partial_ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0), 0)
    return total


@triton.jit
def _normalizer_kernel(
    x_ptr,  # [rows, channels]: its first row was subtracted before summing
    sums_ptr,  # [splits, 2, channels]
    gamma_ptr,  # [channels]
    beta_ptr,  # [channels]
    running_mean_ptr,  # [channels]
    running_var_ptr,  # [channels]
    table_ptr,  # [4, channels]: mean, 1 / std, scale, shift; and the variance if nothing is updated
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
    shifted = _sum_of_splits(sums_ptr, columns, inside, splits, 2 * channels, SPLITS, CHANNELS, ACC) / rows
    squares = _sum_of_splits(sums_ptr + channels, columns, inside, splits, 2 * channels, SPLITS, CHANNELS, ACC) / rows
    mean = shifted + tl.load(x_ptr + columns, mask=inside, other=0.0).to(ACC)
    variance = tl.maximum(squares - shifted * shifted, 0.0)
    inverse_std = 1.0 / tl.sqrt(variance + eps)
    scale = tl.load(gamma_ptr + columns, mask=inside, other=0.0).to(ACC) * inverse_std
    shift = tl.load(beta_ptr + columns, mask=inside, other=0.0).to(ACC) - mean * scale
    tl.store(table_ptr + columns, mean, mask=inside)
    tl.store(table_ptr + channels + columns, inverse_std, mask=inside)
    tl.store(table_ptr + 2 * channels + columns, scale, mask=inside)
    tl.store(table_ptr + 3 * channels + columns, shift, mask=inside)
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
def _end_kernel(
    x_ptr,  # [rows, channels]
    shortcut_ptr,  # [rows, channels]
    table_ptr,  # [4, channels]
    weight_ptr,  # [state, channels]
    output_ptr,  # [rows, channels]
    projected_ptr,  # [rows, state]
    rows,
    channels,
    state,
    HAS_SHORTCUT: tl.constexpr,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
):
    lines = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    states = tl.arange(0, STATE)
    projected = tl.zeros([ROWS, STATE], ACC)
    for start in range(0, channels, CHANNELS):
        columns = start + tl.arange(0, CHANNELS)
        inside = columns < channels
        mask = (lines < rows)[:, None] & inside[None, :]
        places = lines.to(tl.int64)[:, None] * channels + columns[None, :]
        x = tl.load(x_ptr + places, mask=mask, other=0.0)
        scale = tl.load(table_ptr + 2 * channels + columns, mask=inside, other=0.0)
        shift = tl.load(table_ptr + 3 * channels + columns, mask=inside, other=0.0)
        y = x.to(ACC) * scale[None, :] + shift[None, :]
        output = y
        if HAS_SHORTCUT:
            output += tl.load(shortcut_ptr + places, mask=mask, other=0.0).to(ACC)
        if RELU:
            output = tl.where(output <= 0, 0.0, output)  # not a maximum, which would discard NaN
        tl.store(output_ptr + places, output.to(x.dtype), mask=mask)
        weight = tl.load(
            weight_ptr + states[None, :] * channels + columns[:, None],
            mask=inside[:, None] & (states < state)[None, :],
            other=0.0,
        )
        projected += tl.dot(y.to(DOT), weight.to(DOT), input_precision="ieee", out_dtype=ACC)
    mask = (lines < rows)[:, None] & (states < state)[None, :]
    places = lines.to(tl.int64)[:, None] * state + states[None, :]
    tl.store(projected_ptr + places, projected.to(projected_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _reduce_kernel(
    grad_ptr,  # [rows, channels]: gradient of x'
    output_ptr,  # [rows, channels]: x'
    x_ptr,  # [rows, channels]
    grad_projected_ptr,  # [rows, state]
    weight_ptr,  # [state, channels]
    table_ptr,  # [4, channels]
    grad_shortcut_ptr,  # [rows, channels]
    sums_ptr,  # [splits, 2, channels]: sums of dy and of dy y^
    grad_weight_ptr,  # [splits, state, channels]
    rows,
    channels,
    state,
    splits,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
):
    split = tl.program_id(1)
    columns = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = columns < channels
    states = tl.arange(0, STATE)
    mean = tl.load(table_ptr + columns, mask=inside, other=0.0)
    inverse_std = tl.load(table_ptr + channels + columns, mask=inside, other=0.0)
    scale = tl.load(table_ptr + 2 * channels + columns, mask=inside, other=0.0)
    shift = tl.load(table_ptr + 3 * channels + columns, mask=inside, other=0.0)
    weight_mask = (states < state)[:, None] & inside[None, :]
    weight = tl.load(weight_ptr + states[:, None] * channels + columns[None, :], mask=weight_mask, other=0.0)
    total = tl.zeros([CHANNELS], ACC)
    correlated = tl.zeros([CHANNELS], ACC)
    grad_weight = tl.zeros([STATE, CHANNELS], ACC)
    for start in range(split * ROWS, rows, splits * ROWS):
        lines = start + tl.arange(0, ROWS)
        mask = (lines < rows)[:, None] & inside[None, :]
        places = lines.to(tl.int64)[:, None] * channels + columns[None, :]
        grad = tl.load(grad_ptr + places, mask=mask, other=0.0)
        if RELU:
            grad = tl.where(tl.load(output_ptr + places, mask=mask, other=0.0) <= 0, 0.0, grad)
            tl.store(grad_shortcut_ptr + places, grad, mask=mask)
        x = tl.load(x_ptr + places, mask=mask, other=0.0)
        grad_projected = tl.load(
            grad_projected_ptr + lines.to(tl.int64)[:, None] * state + states[None, :],
            mask=(lines < rows)[:, None] & (states < state)[None, :],
            other=0.0,
        )
        grad_y = grad.to(ACC) + tl.dot(grad_projected.to(DOT), weight.to(DOT), input_precision="ieee", out_dtype=ACC)
        normalized = (x.to(ACC) - mean[None, :]) * inverse_std[None, :]
        total += tl.sum(grad_y, 0)
        correlated += tl.sum(grad_y * normalized, 0)
        y = (x.to(ACC) * scale[None, :] + shift[None, :]).to(DOT)
        grad_weight += tl.dot(tl.trans(grad_projected.to(DOT)), y, input_precision="ieee", out_dtype=ACC)
    tl.store(sums_ptr + (split * 2) * channels + columns, total, mask=inside)
    tl.store(sums_ptr + (split * 2 + 1) * channels + columns, correlated, mask=inside)
    places = (split * state + states)[:, None] * channels + columns[None, :]
    tl.store(grad_weight_ptr + places, grad_weight, mask=weight_mask)


@triton.jit
def _gradients_kernel(
    sums_ptr,  # [splits, 2, channels]
    partial_ptr,  # [splits, state, channels]: partial sums of the gradient of the weight
    grad_norm_ptr,  # [2, channels]: gradients of beta and of gamma
    grad_weight_ptr,  # [state, channels]
    channels,
    state,
    splits,
    SPLITS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    row = tl.program_id(1)  # row of the weight; the last two programs compute the gradients of the norm
    columns = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = columns < channels
    if row < state:
        start = partial_ptr + row * channels
        total = _sum_of_splits(start, columns, inside, splits, state * channels, SPLITS, CHANNELS, ACC)
        tl.store(grad_weight_ptr + row * channels + columns, total, mask=inside)
    else:
        start = sums_ptr + (row - state) * channels
        total = _sum_of_splits(start, columns, inside, splits, 2 * channels, SPLITS, CHANNELS, ACC)
        tl.store(grad_norm_ptr + (row - state) * channels + columns, total, mask=inside)


@triton.jit
def _input_kernel(
    grad_shortcut_ptr,  # [rows, channels]
    x_ptr,  # [rows, channels]
    grad_projected_ptr,  # [rows, state]
    weight_ptr,  # [state, channels]
    table_ptr,  # [4, channels]
    sums_ptr,  # [2, channels]: sums of dy and of dy y^
    grad_x_ptr,  # [rows, channels]
    rows,
    channels,
    state,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
):
    lines = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = columns < channels
    states = tl.arange(0, STATE)
    mask = (lines < rows)[:, None] & inside[None, :]
    places = lines.to(tl.int64)[:, None] * channels + columns[None, :]
    grad = tl.load(grad_shortcut_ptr + places, mask=mask, other=0.0)
    x = tl.load(x_ptr + places, mask=mask, other=0.0)
    grad_projected = tl.load(
        grad_projected_ptr + lines.to(tl.int64)[:, None] * state + states[None, :],
        mask=(lines < rows)[:, None] & (states < state)[None, :],
        other=0.0,
    )
    weight = tl.load(
        weight_ptr + states[:, None] * channels + columns[None, :],
        mask=(states < state)[:, None] & inside[None, :],
        other=0.0,
    )
    mean = tl.load(table_ptr + columns, mask=inside, other=0.0)
    inverse_std = tl.load(table_ptr + channels + columns, mask=inside, other=0.0)
    scale = tl.load(table_ptr + 2 * channels + columns, mask=inside, other=0.0)
    average = tl.load(sums_ptr + columns, mask=inside, other=0.0).to(ACC) / rows
    correlated = tl.load(sums_ptr + channels + columns, mask=inside, other=0.0).to(ACC) / rows
    grad_y = grad.to(ACC) + tl.dot(grad_projected.to(DOT), weight.to(DOT), input_precision="ieee", out_dtype=ACC)
    normalized = (x.to(ACC) - mean[None, :]) * inverse_std[None, :]
    grad_x = (grad_y - average[None, :] - normalized * correlated[None, :]) * scale[None, :]
    tl.store(grad_x_ptr + places, grad_x.to(x.dtype), mask=mask)


def _blocks(channels: int, state: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "ROWS": ROWS,
        "CHANNELS": tile(channels, CHANNELS),
        "STATE": tile(state, MOST_STATE_CHANNELS),
        **number_types(dtype),
    }


def _splits(rows: int, channels: int, blocks: dict[str, Any]) -> int:
    chunks = pieces(channels, blocks["CHANNELS"])
    return max(1, min(pieces(rows, ROWS), PROGRAMS // chunks))


def _forward(
    x: Tensor,
    weight: Tensor,
    shortcut: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    relu: bool,
    momentum: float,
    eps: float,
    differentiated: bool,
) -> tuple[Tensor | None, ...]:
    """Returns x' and p; and the table of the norm and the weight in the dtype of x.

    If there are no running statistics to update, the table has a fifth row with the variance.
    """
    batch, channels, height, width = x.shape
    rows, state = batch * height * width, len(weight)
    blocks = _blocks(channels, state, x.dtype)
    splits = _splits(rows, channels, blocks)
    chunks = pieces(channels, blocks["CHANNELS"])
    acc = torch.promote_types(x.dtype, torch.float32)
    channel_blocks = {"CHANNELS": blocks["CHANNELS"], "ACC": blocks["ACC"]}
    sums = torch.empty((splits, 2, channels), device=x.device, dtype=acc)
    run_kernel(_statistics_kernel, (chunks, splits), x, sums, rows, channels, splits, ROWS=ROWS, **channel_blocks)
    update = running_mean is not None
    table = torch.empty((4 if update else 5, channels), device=x.device, dtype=acc)
    statistics = (running_mean, running_var) if update else (table, table)
    run_kernel(
        _normalizer_kernel, (chunks,),
        x, sums, norm_weight, norm_bias, *statistics, table, rows, channels, splits,
        eps, momentum, rows / max(1, rows - 1), UPDATE=update, SPLITS=SPLITS, **channel_blocks,
    )  # fmt: skip
    narrow_weight = weight.detach().to(x.dtype).contiguous()
    output, projected = torch.empty_like(x), _empty_projection(x, weight)
    run_kernel(
        _end_kernel, (pieces(rows, ROWS),),
        x, x if shortcut is None else shortcut, table, narrow_weight, output, projected, rows, channels, state,
        HAS_SHORTCUT=shortcut is not None, RELU=relu, **blocks,
    )  # fmt: skip
    return output, projected, table, narrow_weight


def _empty_projection(x: Tensor, weight: Tensor) -> Tensor:
    shape = (x.shape[0], weight.shape[0], *x.shape[2:])
    return torch.empty(shape, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)


def _fake(x: Tensor, weight: Tensor, shortcut: Any, gamma: Any, beta: Any, running_mean: Any, *args: Any) -> Any:
    """Returns tensors like those of `_forward`, without values."""
    table = x.new_empty(
        (5 if running_mean is None else 4, x.shape[1]), dtype=torch.promote_types(x.dtype, torch.float32)
    )
    return torch.empty_like(x), _empty_projection(x, weight), table, x.new_empty(weight.shape)


def _backward(
    arguments: tuple[Any, ...], results: tuple[Tensor | None, ...], grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the tensors among the arguments of `_forward`."""
    x, weight, shortcut, norm_weight, norm_bias, _, _, relu, *_ = arguments
    output, _, table, narrow_weight = results
    assert table is not None
    assert narrow_weight is not None
    grad = torch.zeros_like(x) if grads[0] is None else _as(grads[0], x)
    grad_projected = _empty_projection(x, weight).zero_() if grads[1] is None else _as(grads[1], x)
    batch, channels, height, width = x.shape
    rows, state = batch * height * width, len(narrow_weight)
    blocks = _blocks(channels, state, x.dtype)
    splits = _splits(rows, channels, blocks)
    chunks = pieces(channels, blocks["CHANNELS"])
    # without an activation, the gradient of the shortcut equals that of the output
    grad_shortcut = torch.empty_like(x) if relu else grad
    sums = torch.empty((splits, 2, channels), device=x.device, dtype=table.dtype)
    partial = torch.empty((splits, state, channels), device=x.device, dtype=table.dtype)
    run_kernel(
        _reduce_kernel, (chunks, splits),
        grad, output if relu else grad, x, grad_projected, narrow_weight, table, grad_shortcut, sums, partial,
        rows, channels, state, splits, RELU=relu, **blocks,
    )  # fmt: skip
    grad_norm = torch.empty((2, channels), device=x.device, dtype=table.dtype)
    grad_weight = torch.empty(weight.shape, device=x.device, dtype=table.dtype)
    run_kernel(
        _gradients_kernel, (chunks, state + 2),
        sums, partial, grad_norm, grad_weight, channels, state, splits,
        SPLITS=SPLITS, CHANNELS=blocks["CHANNELS"], ACC=blocks["ACC"],
    )  # fmt: skip
    grad_x = torch.empty_like(x)
    run_kernel(
        _input_kernel, (pieces(rows, ROWS), chunks),
        grad_shortcut, x, grad_projected, narrow_weight, table, grad_norm, grad_x, rows, channels, state, **blocks,
    )  # fmt: skip
    return (
        grad_x, grad_weight.to(weight.dtype), None if shortcut is None else grad_shortcut,
        grad_norm[1].to(norm_weight.dtype), grad_norm[0].to(norm_bias.dtype), None, None,
    )  # fmt: skip


def _as(grad: Tensor, x: Tensor) -> Tensor:
    return grad.to(x.dtype).contiguous(memory_format=torch.channels_last)


_end = DifferentiableOperator(
    "residual_end",
    _forward,
    _backward,
    _fake,
    outputs=2,
    results=4,
    keep=lambda args, results: (results[0] if args[7] else None, None, *results[2:]),  # x' for the ReLU
    constant=("running_mean", "running_var"),
    unread={"shortcut": "x", "running_mean": None, "running_var": None},
)


def unsupported_reason(
    x: Tensor, norm: BatchNormArguments, weight: Tensor, shortcut: Tensor | None, *, relu: bool = True
) -> str | None:
    if torch.compiler.is_compiling() and not is_compiled():
        return TRACED
    if is_compiled() and not (COMPILED or is_chosen("triton")):
        return "torch.compile fuses the implementation for it"
    if x.is_meta:
        return TRACED
    maps = [x] if shortcut is None else [x, shortcut]
    if any(not is_channels_last(map_) for map_ in maps):
        return "the maps must be channels_last"
    if any(map_.shape != x.shape or map_.dtype != x.dtype for map_ in maps):
        return "the shortcut must have the shape and dtype of the map"
    if weight.shape[0] > MOST_STATE_CHANNELS:
        return f"the state must have at most {MOST_STATE_CHANNELS} channels, got {weight.shape[0]}"
    if x.dtype not in TYPES:
        return f"the maps must be of floating point, got {x.dtype}"
    reason = device_unsupported_reason(x) or shared_unsupported_reason(x, norm, weight, shortcut, relu=relu)
    if reason is None and not all(t.is_contiguous() for t in norm.tensors):
        return "the norm's weights and statistics must be contiguous"
    return reason


def residual_end(
    x: Tensor, norm: BatchNormArguments, weight: Tensor, shortcut: Tensor | None, *, relu: bool = True
) -> tuple[Tensor, Tensor]:
    numbers = (relu, norm.momentum, norm.eps)
    if not torch.compiler.is_compiling():
        return _end(x, weight, shortcut, *norm.tensors, *numbers)  # type: ignore[no-any-return]
    output, projected, table, _ = _end.traced(x, weight, shortcut, *operator_tensors(norm), *numbers)
    update_statistics(norm, table, x)
    return output, projected
