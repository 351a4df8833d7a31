"""The feed-forward network of a transformer block.

    y = W_2 gelu(W_1 x + b_1) + b_2

    x          [..., C]
    weight_1   [H, C]: W_1
    bias_1     [H]: b_1
    weight_2   [C', H]: W_2
    bias_2     [C']: b_2
    result     [..., C']

The backward pass of torch's modules uses the hidden features before and after the activation, each usually four times
as wide as the tokens. It is sufficient to save the features before the activation and to recompute the others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .autocast import autocast_type
from .dispatch import Implementation, Operation, triton_implementation
from .once import once_differentiable


def _reference(x: Tensor, weight_1: Tensor, bias_1: Tensor, weight_2: Tensor, bias_2: Tensor) -> Tensor:
    """Applies two linear layers with a GELU between them.

    See the module docstring for the equation and the shapes.
    """
    return F.linear(F.gelu(F.linear(x, weight_1, bias_1)), weight_2, bias_2)


def _recompute_unsupported_reason(x: Tensor, *weights: Tensor) -> str | None:
    if torch.compiler.is_compiling():
        return "torch.compile decides itself what to save"
    if not torch.is_grad_enabled():
        return "nothing is saved where gradients are disabled"
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms torch's own operations"
    return None


def _recompute(x: Tensor, weight_1: Tensor, bias_1: Tensor, weight_2: Tensor, bias_2: Tensor) -> Tensor:
    """Saves only the hidden features before the activation, and recomputes those after it."""
    result: Tensor = _FeedForward.apply(x, weight_1, bias_1, weight_2, bias_2, autocast_type(x))
    return result


class _FeedForward(torch.autograd.Function):
    """Casts to the autocast dtype itself: each gradient is cast back once, and those of the biases never."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights_and_dtype: Any) -> Tensor:
        *weights, dtype = weights_and_dtype
        ctx.dtypes = [t.dtype for t in (x, *weights)]
        x, weight_1, bias_1, weight_2, bias_2 = (t if dtype is None else t.to(dtype) for t in (x, *weights))
        hidden = F.linear(x, weight_1, bias_1)
        ctx.save_for_backward(x, hidden, weight_1, weight_2)
        return F.linear(F.gelu(hidden), weight_2, bias_2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, hidden, weight_1, weight_2 = ctx.saved_tensors
        needs_x, needs_weight_1, needs_bias_1, needs_weight_2, needs_bias_2, _ = ctx.needs_input_grad
        grad_x = grad_weight_1 = grad_bias_1 = grad_weight_2 = grad_bias_2 = None
        rows = grad.reshape(-1, grad.shape[-1])
        if needs_bias_2:
            grad_bias_2 = column_sums(rows)
        if any((needs_x, needs_weight_1, needs_bias_1, needs_weight_2)):
            flat = hidden.view(-1, hidden.shape[-1])
            grad_hidden, activated, grad_bias_1 = gelu_gradients(flat, rows @ weight_2)
            if needs_weight_2:
                grad_weight_2 = rows.t() @ activated
            del activated
            if needs_weight_1:
                grad_weight_1 = grad_hidden.t() @ x.reshape(-1, x.shape[-1])
            if needs_x:
                grad_x = (grad_hidden @ weight_1).view(x.shape)
        grads = (grad_x, grad_weight_1, grad_bias_1, grad_weight_2, grad_bias_2)
        return *(g if g is None else g.to(dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True)), None


def _gelu_gradients(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the steps of the backward pass that read the hidden features.

    Args:
        x: The hidden features before the activation, [N, C].
        grad: The gradient of gelu(x), [N, C]. It may be overwritten.

    Returns:
        The gradient of x, [N, C], gelu(x), [N, C], and the sum of the gradient over its rows, [C].
    """
    grad_x = torch.ops.aten.gelu_backward(grad, x)
    return grad_x, F.gelu(x), _column_sums(grad_x)


def _column_sums(x: Tensor) -> Tensor:
    """Sums x, [N, C], over its rows: [C]. The sum is accumulated in float32 or float64."""
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


feed_forward = Operation(
    "feed_forward", _reference, [Implementation("recompute", _recompute, _recompute_unsupported_reason)]
)

# Steps of the backward pass. They are not strict, because the chosen backend may be that of another operation.
gelu_gradients = Operation(
    "gelu_gradients", _gelu_gradients, triton_implementation("feed_forward", "gelu_gradients", strict=False)
)
column_sums = Operation("column_sums", _column_sums, triton_implementation("feed_forward", "column_sums", strict=False))
