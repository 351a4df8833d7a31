"""The end of a residual block whose branch is handed to a state along depth.

Paper: Recurrence along Depth (RLA), NeurIPS 2021, section 3.3 and Figure 3. The branch y is what comes out of the
block's last norm. One copy is joined with the shortcut, the other goes through the 1x1 convolution g1, whose result the
state takes in:

    y  = BN(x)          x: the last convolution's map, [B, C, H, W]
    x' = ReLU(y + s)    s: the shortcut, [B, C, H, W]
    p  = g1(y)          [B, k, H, W]

The norm keeps x for the backward pass. y need not be kept for g1, because y = x scale + shift channel by channel: the
gradient of g1's weights, the sum over pixels of dp yᵀ, is (sum of dp xᵀ) scale + (sum of dp) shiftᵀ.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from .dispatch import Operation, asked_for
from .once import once_differentiable


@Operation
def residual_end(
    x: Tensor, norm: nn.Module, weight: Tensor, shortcut: Tensor | None, *, relu: bool = True
) -> tuple[Tensor, Tensor]:
    """x' = ReLU(y + s) and p = g1(y) of y = norm(x).

    Args:
        x: the map before the norm, [B, C, H, W].
        norm: a norm over C channels; the moving statistics of a batch norm are updated in training.
        weight: of g1, [k, C, 1, 1].
        shortcut: s; None for none.
        relu: False for x' = y + s.
    """
    y = norm(x)
    return _joined(y, shortcut, relu), F.conv2d(y, weight)


def _joined(y: Tensor, shortcut: Tensor | None, relu: bool) -> Tensor:
    output = y if shortcut is None else y + shortcut
    return F.relu(output) if relu else output


def objection_to_norm(x: Tensor, norm: nn.Module, weight: Tensor) -> str | None:
    """Why the norm's part cannot be written out, or None."""
    if isinstance(norm, BatchNormAct2d):
        if not (isinstance(norm.act, nn.Identity) and isinstance(norm.drop, nn.Identity)):
            return "the norm has an activation"
    elif type(norm) is not nn.BatchNorm2d:
        return f"the norm must be a BatchNorm2d, got {type(norm).__name__}"
    if not norm.training:
        return "the norm is in eval mode, where nothing is kept for a backward pass"
    if not norm.affine or not norm.track_running_stats or norm.momentum is None:
        return "the norm must have weights, moving statistics and a fixed momentum"
    if any((norm._forward_hooks, norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks)):
        return "the norm has hooks"
    if weight.shape[2:] != (1, 1):
        return f"the convolution must be 1x1, got {tuple(weight.shape[2:])}"
    if x.numel() // x.shape[1] < 2:
        return "one value for each channel has no spread"
    return None


def _objection(x: Tensor, norm: nn.Module, weight: Tensor, shortcut: Tensor | None, *, relu: bool = True) -> str | None:
    return objection_to_norm(x, norm, weight)


@residual_end.kernel("recompute", _objection)
def _recomputing(
    x: Tensor, norm: Any, weight: Tensor, shortcut: Tensor | None, *, relu: bool = True
) -> tuple[Tensor, Tensor]:
    """The same in torch's operations, keeping x instead of y."""
    norm.num_batches_tracked.add_(1)
    y, mean, inverse_std = torch.native_batch_norm(
        x, norm.weight, norm.bias, norm.running_mean, norm.running_var, True, norm.momentum, norm.eps
    )
    scale = norm.weight.detach() * inverse_std
    shift = norm.bias.detach() - mean * scale
    projected: Tensor = _Projection.apply(y, x.detach(), scale, shift, weight)
    return _joined(y, shortcut, relu), projected


class _Projection(torch.autograd.Function):
    """A 1x1 convolution of y = x scale + shift that keeps x, scale and shift."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale, shift, weight)
        return F.conv2d(y, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, scale, shift, weight = ctx.saved_tensors
        grad_y = F.conv2d(grad, weight.to(grad.dtype).flatten(1).t()[..., None, None])
        products = pixels(grad).t() @ pixels(x.to(grad.dtype))  # [k, C]
        sums = grad.sum((0, 2, 3), dtype=scale.dtype)
        grad_weight = products.to(scale.dtype) * scale + sums[:, None] * shift
        return grad_y, None, None, None, grad_weight.to(weight.dtype).reshape(weight.shape)


def _objection_to_scaled(
    x: Tensor, norm: nn.Module, weight: Tensor, shortcut: Tensor | None, *, relu: bool = True
) -> str | None:
    if not (torch.compiler.is_compiling() or asked_for("scaled")):
        return "outside of torch.compile it would store maps in float32"
    return objection_to_norm(x, norm, weight)


@residual_end.kernel("scaled", _objection_to_scaled)
def _scaled(
    x: Tensor, norm: Any, weight: Tensor, shortcut: Tensor | None, *, relu: bool = True
) -> tuple[Tensor, Tensor]:
    """The same with g1's weights scaled instead of its input: g1(y) = (W scale) x + W shift.

    For torch.compile, which then computes y where it is added and never stores it. Differentiating scale and shift
    through the statistics gives what the norm's backward pass would have given.
    """
    norm.num_batches_tracked.add_(1)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(wide, (0, 2, 3), correction=0)
    with torch.no_grad():
        count = x.numel() // x.shape[1]
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), norm.momentum)
        unbiased = variance * (count / max(1, count - 1))
        norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), norm.momentum)
    scale = norm.weight * (variance + norm.eps).rsqrt()
    shift = norm.bias - mean * scale
    y = (wide * scale[:, None, None] + shift[:, None, None]).to(x.dtype)
    flat = weight.flatten(1)
    constant = (flat * shift).sum(1)
    projected = pointwise(x, (flat * scale).to(x.dtype)[..., None, None]) + constant[:, None, None].to(x.dtype)
    return _joined(y, shortcut, relu), projected


def pointwise(x: Tensor, weight: Tensor) -> Tensor:
    """A 1x1 convolution.

    Inside torch.compile it is a product over the pixels of a channels_last map: the compiler puts what follows into a
    product, and hands a convolution to cuDNN, which is slow for the few channels of a state.
    """
    if not (torch.compiler.is_compiling() and x.is_contiguous(memory_format=torch.channels_last)):
        return F.conv2d(x, weight)
    product = pixels(x) @ weight.flatten(1).t()
    return product.view(x.shape[0], *x.shape[2:], -1).permute(0, 3, 1, 2)


def pixels(x: Tensor) -> Tensor:
    """[B, C, H, W] as one row for every pixel, a view where the map is channels_last."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
