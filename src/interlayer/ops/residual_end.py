"""The end of a residual block whose branch also updates a state along depth.

Paper: Recurrence along Depth (RLA), NeurIPS 2021, section 3.3 and Figure 3. The branch y is the output of the block's
last norm. It is added to the shortcut, and a 1x1 convolution g1 projects it to the state's channels:

    y  = BN(x)          x: the output of the last convolution, [B, C, H, W]
    x' = ReLU(y + s)    s: the shortcut, [B, C, H, W]
    p  = g1(y)          [B, k, H, W]

The norm saves x for the backward pass. y need not be saved for g1, because y = x scale + shift channel by channel: the
gradient of g1's weight, the sum over pixels of dp yᵀ, is (sum of dp xᵀ) scale + (sum of dp) shiftᵀ.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import Implementation, Operation, is_chosen, triton_implementation
from .once import once_differentiable
from .pointwise import pixels, pointwise


def _reference(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor,
    shortcut: Tensor | None,
    *,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    relu: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute x' = ReLU(y + s) and p = g1(y) for y = BN(x).

    See the module docstring for the equations. As in :func:`torch.nn.functional.batch_norm`, `running_mean` and
    `running_var` are updated in place in training and used for the normalization otherwise.

    Args:
        x: The map before the norm, [B, C, H, W].
        norm_weight: γ of the batch norm, [C].
        norm_bias: β of the batch norm, [C].
        running_mean: The running mean, [C].
        running_var: The running variance, [C].
        weight: The weight of g1, [k, C, 1, 1].
        shortcut: s, [B, C, H, W], or None for a block without a shortcut.
        training: Whether the norm uses the statistics of the batch.
        momentum: The weight of the batch in the running statistics.
        eps: The value added to the variance.
        relu: False for x' = y + s.

    Returns:
        x', [B, C, H, W], and p, [B, k, H, W].
    """
    y = F.batch_norm(x, running_mean, running_var, norm_weight, norm_bias, training, momentum, eps)
    return _add_shortcut(y, shortcut, relu), F.conv2d(y, weight)


def _add_shortcut(y: Tensor, shortcut: Tensor | None, relu: bool) -> Tensor:
    output = y if shortcut is None else y + shortcut
    return F.relu(output) if relu else output


def unsupported_reason(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor,
    shortcut: Tensor | None,
    *,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    relu: bool = True,
) -> str | None:
    """Why none of the implementations below supports the arguments, or None."""
    if not training:
        return "the norm is in eval mode, where nothing is saved for a backward pass"
    if weight.shape[2:] != (1, 1):
        return f"the convolution must be 1x1, got {tuple(weight.shape[2:])}"
    if x.numel() // x.shape[1] < 2:
        return "a channel with a single value has no variance"
    return None


def _recompute(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor,
    shortcut: Tensor | None,
    *,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    relu: bool = True,
) -> tuple[Tensor, Tensor]:
    """Saves x instead of y for the gradient of g1."""
    y, mean, inverse_std = torch.native_batch_norm(
        x, norm_weight, norm_bias, running_mean, running_var, True, momentum, eps
    )
    scale = norm_weight.detach() * inverse_std
    shift = norm_bias.detach() - mean * scale
    projected: Tensor = _Projection.apply(y, x.detach(), scale, shift, weight)
    return _add_shortcut(y, shortcut, relu), projected


class _Projection(torch.autograd.Function):
    """A 1x1 convolution of y = x scale + shift that saves x, scale and shift."""

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


def _scaled_unsupported_reason(*args: Any, **options: Any) -> str | None:
    if not (torch.compiler.is_compiling() or is_chosen("scaled")):
        return "outside of torch.compile it would store maps in float32"
    return unsupported_reason(*args, **options)


def _scaled(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor,
    shortcut: Tensor | None,
    *,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    relu: bool = True,
) -> tuple[Tensor, Tensor]:
    """Scales the weight of g1 instead of its input: g1(y) = (W scale) x + W shift.

    It is meant for ``torch.compile``, which then computes y where it is added and never stores it. Differentiating
    scale and shift through the statistics gives the same gradients as the backward pass of the norm.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(wide, (0, 2, 3), correction=0)
    with torch.no_grad():
        count = x.numel() // x.shape[1]
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        unbiased = variance * (count / max(1, count - 1))
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    scale = norm_weight * (variance + eps).rsqrt()
    shift = norm_bias - mean * scale
    y = (wide * scale[:, None, None] + shift[:, None, None]).to(x.dtype)
    flat = weight.flatten(1)
    constant = (flat * shift).sum(1)
    projected = pointwise(x, (flat * scale).to(x.dtype)[..., None, None]) + constant[:, None, None].to(x.dtype)
    return _add_shortcut(y, shortcut, relu), projected


residual_end = Operation(
    "residual_end",
    _reference,
    [
        *triton_implementation("residual_end"),
        Implementation("scaled", _scaled, _scaled_unsupported_reason),
        Implementation("recompute", _recompute, unsupported_reason),
    ],
)
