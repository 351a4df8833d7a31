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
from torch.autograd.function import once_differentiable

from .autocast import autocast_type, without_autocast
from .dispatch import Operation


@Operation
def feed_forward(x: Tensor, weight_1: Tensor, bias_1: Tensor, weight_2: Tensor, bias_2: Tensor) -> Tensor:
    """Two linear layers and a GELU between them."""
    return F.linear(F.gelu(F.linear(x, weight_1, bias_1)), weight_2, bias_2)


def _objection_to_recompute(x: Tensor, *weights: Tensor) -> str | None:
    if torch.compiler.is_compiling():
        return "torch.compile decides itself what to keep"
    if not torch.is_grad_enabled():
        return "nothing is kept where no gradient is asked for"
    return None


@feed_forward.kernel("recompute", _objection_to_recompute)
def _recomputing(x: Tensor, weight_1: Tensor, bias_1: Tensor, weight_2: Tensor, bias_2: Tensor) -> Tensor:
    """The same, keeping the hidden features before the activation alone."""
    x, weight_1, bias_1, weight_2, bias_2 = (_as_autocast(t) for t in (x, weight_1, bias_1, weight_2, bias_2))
    with without_autocast(x):
        return _GeluLinear.apply(F.linear(x, weight_1, bias_1), weight_2, bias_2)


class _GeluLinear(torch.autograd.Function):
    """W gelu(x) + b, of which x is kept and gelu(x) is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(F.gelu(x), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_weight = rows.t() @ F.gelu(x).flatten(0, -2)
        return torch.ops.aten.gelu_backward(grad @ weight, x), grad_weight, rows.sum(0)


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
