"""Depthwise convolution of kernel size s + 1 and stride s in one pass over a channels_last map.

In the forward pass, a program loads the window of one output pixel, [taps, channels], and sums over the taps. In the
backward pass, an input pixel belongs to one window and, if it is the first pixel of that window in a direction, also to
the previous window. The gradient of the weight is accumulated by programs that process many windows each.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .runtime import SLOTS, TYPES, Operator, device_unsupported_reason, pieces, power_of_2, run_kernel

CHANNELS = 64  # channels of a program
PIXELS = 64  # pixels of a program that computes the gradient of the input
MOST_STRIDE = 8  # a window of 9 x 9
PROGRAMS = 512  # programs that compute the gradient of the weight


@triton.jit
def _window(
    x_ptr, image, i, j, c, height, width, channels, KERNEL: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr
):
    """Loads the window of output pixel (i, j), [TAPS, CHANNELS], with zeros outside the map."""
    t = tl.arange(0, TAPS)
    y = i * STRIDE - STRIDE // 2 + t // KERNEL
    x = j * STRIDE - STRIDE // 2 + t % KERNEL
    inside = (t < KERNEL * KERNEL) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    places = ((image * height + y.to(tl.int64)) * width + x)[:, None] * channels + c[None, :]
    return tl.load(x_ptr + places, mask=inside[:, None] & (c < channels)[None, :], other=0.0)


@triton.jit
def _forward_kernel(
    x_ptr,  # [batch, height, width, channels]
    weight_ptr,  # [KERNEL KERNEL, channels]
    bias_ptr,  # [channels]
    output_ptr,  # [batch, down, across, channels]
    height, width, channels, down, across,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0)
    image = output // (down * across)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    t = tl.arange(0, TAPS)
    mask = (t < KERNEL * KERNEL)[:, None] & (c < channels)[None, :]
    weight = tl.load(weight_ptr + t[:, None] * channels + c[None, :], mask=mask, other=0.0)
    window = _window(
        x_ptr, image, (output // across) % down, output % across, c, height, width, channels, KERNEL, STRIDE, TAPS
    )
    total = tl.sum(window.to(ACC) * weight.to(ACC), 0) + tl.load(bias_ptr + c, mask=c < channels, other=0.0).to(ACC)
    tl.store(output_ptr + output * channels + c, total.to(output_ptr.dtype.element_ty), mask=c < channels)


@triton.jit
def _input_gradient_kernel(
    grad_ptr,  # [batch, down, across, channels]
    weight_ptr,
    grad_x_ptr,  # [batch, height, width, channels]
    pixels, height, width, channels, down, across,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    c = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    image = pixel // (height * width)
    y = (pixel // width) % height + STRIDE // 2
    x = pixel % width + STRIDE // 2
    total = tl.zeros([PIXELS, CHANNELS], ACC)
    for before_y in tl.static_range(2):
        for before_x in tl.static_range(2):
            i = y // STRIDE - before_y
            j = x // STRIDE - before_x
            a = y - i * STRIDE
            b = x - j * STRIDE
            reads = (a < KERNEL) & (b < KERNEL) & (i >= 0) & (j >= 0) & (i < down) & (j < across) & (pixel < pixels)
            mask = reads[:, None] & (c < channels)
            grad = tl.load(grad_ptr + ((image * down + i) * across + j)[:, None] * channels + c, mask=mask, other=0.0)
            weight = tl.load(weight_ptr + (a * KERNEL + b)[:, None] * channels + c, mask=mask, other=0.0)
            total += grad.to(ACC) * weight.to(ACC)
    places = pixel[:, None] * channels + c
    mask = (pixel < pixels)[:, None] & (c < channels)
    tl.store(grad_x_ptr + places, total.to(grad_x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weight_gradient_kernel(
    grad_ptr,
    x_ptr,
    grad_weight_ptr,  # [SLOTS, channels, KERNEL KERNEL], float32
    outputs, height, width, channels, down, across,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    t = tl.arange(0, TAPS)
    total = tl.zeros([TAPS, CHANNELS], ACC)
    for output in range(tl.program_id(0), outputs, tl.num_programs(0)):
        window = _window(
            x_ptr, output // (down * across), (output // across) % down, output % across, c, height, width, channels,
            KERNEL, STRIDE, TAPS,
        )  # fmt: skip
        grad = tl.load(grad_ptr + output * channels + c, mask=c < channels, other=0.0)
        total += window.to(ACC) * grad.to(ACC)[None, :]
    slot = (tl.program_id(0) % SLOTS) * channels * (KERNEL * KERNEL)
    mask = (t < KERNEL * KERNEL)[:, None] & (c < channels)[None, :]
    places = c[None, :] * (KERNEL * KERNEL) + t[:, None]
    tl.atomic_add(grad_weight_ptr + slot + places, total, mask=mask, sem="relaxed")


def _sizes(x: Tensor, stride: int) -> tuple[int, int]:
    """Returns the height and width of the result."""
    down, across = ((size + 2 * (stride // 2) - stride - 1) // stride + 1 for size in x.shape[2:])
    return down, across


def _constants(x: Tensor, stride: int) -> dict[str, Any]:
    accumulate = TYPES[torch.promote_types(x.dtype, torch.float32)]
    return {"KERNEL": stride + 1, "STRIDE": stride, "CHANNELS": CHANNELS, "ACC": accumulate}


def _by_tap(weight: Tensor) -> Tensor:
    """Reshapes [C, 1, k, k] to [k k, C], so that the channels of one tap are contiguous."""
    return weight.flatten(1).t().contiguous()


def _taps(stride: int) -> int:
    return power_of_2((stride + 1) ** 2)


@partial(Operator, "shrink")
def _forward(x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    batch, channels, height, width = x.shape
    down, across = _sizes(x, stride)
    output = _empty_result(x, stride)
    grid = (batch * down * across, pieces(channels, CHANNELS))
    run_kernel(
        _forward_kernel, grid,
        x, _by_tap(weight), bias.contiguous(), output, height, width, channels, down, across,
        TAPS=_taps(stride), **_constants(x, stride),
    )  # fmt: skip
    return output


@_forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    return _empty_result(x, stride)


def _empty_result(x: Tensor, stride: int) -> Tensor:
    shape = (*x.shape[:2], *_sizes(x, stride))
    return torch.empty(shape, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)


@partial(Operator, "shrink_backward")
def _backward(grad: Tensor, x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and weight."""
    batch, channels, height, width = x.shape
    down, across = _sizes(x, stride)
    grad, by_tap = grad.to(x.dtype).contiguous(memory_format=torch.channels_last), _by_tap(weight)
    grad_x = torch.empty_like(x)
    accumulate = torch.promote_types(x.dtype, torch.float32)
    grad_weight = torch.zeros((SLOTS.value, *weight.shape), device=x.device, dtype=accumulate)
    blocks = pieces(channels, CHANNELS)
    sizes, constants = (height, width, channels, down, across), _constants(x, stride)
    pixels, outputs = batch * height * width, batch * down * across
    run_kernel(
        _input_gradient_kernel, (pieces(pixels, PIXELS), blocks),
        grad, by_tap, grad_x, pixels, *sizes, PIXELS=PIXELS, **constants,
    )  # fmt: skip
    run_kernel(
        _weight_gradient_kernel, (min(PROGRAMS, outputs), blocks),
        grad, x, grad_weight, outputs, *sizes, TAPS=_taps(stride), **constants,
    )  # fmt: skip
    return grad_x, grad_weight.sum(0).to(weight.dtype)


@_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty(weight.shape, device=weight.device, dtype=weight.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.stride = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_type = bias.dtype


def _differentiate(ctx: Any, grad: Tensor) -> Any:
    grad_x, grad_weight = _backward(grad, *ctx.saved_tensors, ctx.stride)
    return grad_x, grad_weight, grad.sum((0, 2, 3), dtype=ctx.bias_type), None


_forward.register_autograd(_differentiate, setup_context=_save)


def unsupported_reason(x: Tensor, weight: Tensor, bias: Tensor, *, stride: int) -> str | None:
    if not x.is_contiguous(memory_format=torch.channels_last):
        return "the map must be channels_last"
    if x.dtype not in TYPES:
        return f"the map must be of a floating-point type, got {x.dtype}"
    if not 2 <= stride <= MOST_STRIDE or tuple(weight.shape) != (x.shape[1], 1, stride + 1, stride + 1):
        return f"expected a stride of 2 to {MOST_STRIDE} and one window of stride + 1 for each channel, got {stride=}"
    if min(_sizes(x, stride)) < 1:
        return f"the map of {x.shape[2]} x {x.shape[3]} is smaller than a window"
    return device_unsupported_reason(x)


def shrink(x: Tensor, weight: Tensor, bias: Tensor, *, stride: int) -> Tensor:
    return _forward(x, weight, bias, stride)
