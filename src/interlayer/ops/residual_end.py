"""End of a residual block with a branch that also updates a recurrent state.

Paper: Recurrence along Depth (RLA), NeurIPS 2021, section 3.3 and Figure 3. The branch y is the output of the block's
last norm. It is added to the shortcut, and a 1x1 convolution g1 projects it to the channels of the state:

    y  = BN(x)          x: the output of the last convolution, [B, C, H, W]
    x' = ReLU(y + s)    s: the shortcut, [B, C, H, W]
    p  = g1(y)          [B, k, H, W]

The norm saves x for the backward pass. y need not be saved for g1, because y = x scale + shift for each channel, so the
gradient of the weight of g1, the sum over pixels of dp yᵀ, is (sum of dp xᵀ) scale + (sum of dp) shiftᵀ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import Implementation, Operation, is_chosen, triton_implementation
from .once import once_differentiable
from .pointwise import pixels, pointwise


class BatchNormArguments(NamedTuple):
    """The arguments of :func:`torch.nn.functional.batch_norm` except for the input.

    In training, `running_mean` and `running_var` are updated in place; otherwise they are used for the normalization.

    Args:
        weight: γ, [C].
        bias: β, [C].
        running_mean: The running mean, [C].
        running_var: The running variance, [C].
        training: Whether the norm uses the statistics of the batch.
        momentum: The weight of the batch in the running statistics.
        eps: The value added to the variance.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    training: bool = True
    momentum: float = 0.1
    eps: float = 1e-5

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weight, bias, running mean and running variance."""
        return self[:4]


def _reference(
    x: Tensor, norm: BatchNormArguments, weight: Tensor, shortcut: Tensor | None, *, relu: bool = True
) -> tuple[Tensor, Tensor]:
    """Computes x' = ReLU(y + s) and p = g1(y) for y = BN(x).

    See the module docstring for the equations. In training, the running statistics of the norm are updated in place.

    Args:
        x: The input of the norm, [B, C, H, W].
        norm: The tensors and options of the batch norm.
        weight: The weight of g1, [k, C, 1, 1].
        shortcut: s, [B, C, H, W], or None for a block without a shortcut.
        relu: Whether to apply the ReLU. If False, x' = y + s.

    Returns:
        x', [B, C, H, W], and p, [B, k, H, W].
    """
    y = F.batch_norm(
        x, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.training, norm.momentum, norm.eps
    )
    return _add_shortcut(y, shortcut, relu), F.conv2d(y, weight)


def _add_shortcut(y: Tensor, shortcut: Tensor | None, relu: bool) -> Tensor:
    output = y if shortcut is None else y + shortcut
    return F.relu(output) if relu else output


def unsupported_reason(
    x: Tensor, norm: BatchNormArguments, weight: Tensor, shortcut: Tensor | None, *, relu: bool = True
) -> str | None:
    """Returns why the implementations below do not support the arguments, or None if they do."""
    if not norm.training:
        return "the norm is in eval mode, where nothing is saved for a backward pass"
    if weight.shape[2:] != (1, 1):
        return f"the convolution must be 1x1, got {tuple(weight.shape[2:])}"
    if x.numel() // x.shape[1] < 2:
        return "a channel with a single value has no variance"
    return None


def _recompute(
    x: Tensor, norm: BatchNormArguments, weight: Tensor, shortcut: Tensor | None, *, relu: bool = True
) -> tuple[Tensor, Tensor]:
    """Saves x instead of y for the gradient of g1."""
    y, mean, inverse_std = torch.native_batch_norm(
        x, norm.weight, norm.bias, norm.running_mean, norm.running_var, True, norm.momentum, norm.eps
    )
    scale = norm.weight.detach() * inverse_std
    shift = norm.bias.detach() - mean * scale
    projected: Tensor = _Projection.apply(y, x.detach(), scale, shift, weight)
    return _add_shortcut(y, shortcut, relu), projected


class _Projection(torch.autograd.Function):
    """1x1 convolution of y = x scale + shift that saves x, scale and shift instead of y."""

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
    x: Tensor, norm: BatchNormArguments, weight: Tensor, shortcut: Tensor | None, *, relu: bool = True
) -> tuple[Tensor, Tensor]:
    """Scales the weight of g1 instead of its input: g1(y) = (W scale) x + W shift.

    It is intended for ``torch.compile``, which then fuses y into the addition and never stores it. Differentiating
    scale and shift through the statistics gives the same gradients as the backward pass of the norm.
    """
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
