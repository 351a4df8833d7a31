"""Parts of a transformer block that keep less for the backward pass, and pass over the tokens less often.

    feed_forward   y = W_2 gelu(W_1 x + b_1) + b_2
    layer_norm     y = (x - mean) / sqrt(var + eps) γ + β over the channels

The reference of both is what torch's modules compute. Its backward pass needs the hidden features before and after the
activation, four times as wide as the tokens each; one of them gives the other. Under autocast torch normalises in
float32 and hands on float32, which the next layer has to cast: a second and a third pass over the tokens.

    x   [..., C]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .autocast import autocast_type, without_autocast
from .dispatch import Operation
from .once import once_differentiable


@Operation
def feed_forward(x: Tensor, weight_1: Tensor, bias_1: Tensor, weight_2: Tensor, bias_2: Tensor) -> Tensor:
    """Two linear layers and a GELU between them."""
    return F.linear(F.gelu(F.linear(x, weight_1, bias_1)), weight_2, bias_2)


def _objection_to_recompute(x: Tensor, *weights: Tensor) -> str | None:
    if torch.compiler.is_compiling():
        return "torch.compile decides itself what to keep"
    if not torch.is_grad_enabled():
        return "nothing is kept where no gradient is asked for"
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms torch's own operations"
    return None


@feed_forward.kernel("recompute", _objection_to_recompute)
def _recomputing(x: Tensor, weight_1: Tensor, bias_1: Tensor, weight_2: Tensor, bias_2: Tensor) -> Tensor:
    """The same, keeping the hidden features before the activation alone."""
    result: Tensor = _FeedForward.apply(x, weight_1, bias_1, weight_2, bias_2, autocast_type(x))
    return result


class _FeedForward(torch.autograd.Function):
    """Casts to `dtype`, where it is given, by itself: gradients are cast back once, and those of biases not at all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        *weights, dtype = given
        ctx.types = [t.dtype for t in (x, *weights)]
        x, weight_1, bias_1, weight_2, bias_2 = (t if dtype is None else t.to(dtype) for t in (x, *weights))
        hidden = F.linear(x, weight_1, bias_1)
        ctx.save_for_backward(x, hidden, weight_1, weight_2)
        return F.linear(F.gelu(hidden), weight_2, bias_2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, hidden, weight_1, weight_2 = ctx.saved_tensors
        of_x, of_weight_1, of_bias_1, of_weight_2, of_bias_2, _ = ctx.needs_input_grad
        grads: list[Tensor | None] = [None] * 5
        rows = grad.reshape(-1, grad.shape[-1])
        if of_bias_2:
            grads[4] = column_sums(rows)
        if any((of_x, of_weight_1, of_bias_1, of_weight_2)):
            flat = hidden.view(-1, hidden.shape[-1])
            grad_hidden, activated, grads[2] = gelu_gradients(flat, rows @ weight_2)
            if of_weight_2:
                grads[3] = rows.t() @ activated
            del activated
            if of_weight_1:
                grads[1] = grad_hidden.t() @ x.reshape(-1, x.shape[-1])
            if of_x:
                grads[0] = (grad_hidden @ weight_1).view(x.shape)
        return *(g if g is None else g.to(dtype) for g, dtype in zip(grads, ctx.types, strict=True)), None


@Operation
def gelu_gradients(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of x from that of gelu(x), which may be overwritten; gelu(x); and the gradient's column sums.

    x and grad are [N, C].
    """
    grad_x = torch.ops.aten.gelu_backward(grad, x)
    return grad_x, F.gelu(x), column_sums.reference(grad_x)


@Operation
def column_sums(x: Tensor) -> Tensor:
    """[C]: the sum over the rows of [N, C], in float32 at least."""
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


def _as_autocast(x: Tensor) -> Tensor:
    """In the type that autocast would give it, where it is on."""
    dtype = autocast_type(x)
    return x if dtype is None else x.to(dtype)


@Operation
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The norm over the last dimension."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _objection_to_narrow(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> str | None:
    if autocast_type(x) is None:
        return "without autocast the norm's type is that of its input already"
    return None


@layer_norm.kernel("narrow", _objection_to_narrow)
def _narrow(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The same with tokens in autocast's type on both sides; mean and variance are added up in float32 all the same."""
    x, weight, bias = (_as_autocast(t) for t in (x, weight, bias))
    with without_autocast(x):
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
