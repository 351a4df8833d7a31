"""Layer norm over the channels of tokens.

    y = (x - mean) / sqrt(var + eps) γ + β

    x        [..., C]
    weight   [C]: γ
    bias     [C]: β
    result   [..., C]

Under autocast, torch normalizes in float32 and returns float32, which the next layer has to cast: a second and a third
pass over the tokens. The implementations here return the autocast dtype.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .autocast import autocast_type, without_autocast
from .dispatch import Implementation, Operation, triton_implementation


def _reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalizes over the last dimension.

    See the module docstring for the equation.

    Args:
        x: Tokens, [..., C].
        weight: γ, [C].
        bias: β, [C].
        eps: The value added to the variance.
    """
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _narrow(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Reads and returns tokens in the autocast dtype. Mean and variance are accumulated in float32."""
    x, weight, bias = (_to_autocast_type(t) for t in (x, weight, bias))
    with without_autocast(x):
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _to_autocast_type(x: Tensor) -> Tensor:
    dtype = autocast_type(x)
    return x if dtype is None else x.to(dtype)


def _narrow_unsupported_reason(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> str | None:
    return None if autocast_type(x) is not None else "without autocast the norm returns the dtype of its input already"


layer_norm = Operation(
    "layer_norm",
    _reference,
    [*triton_implementation("layer_norm"), Implementation("narrow", _narrow, _narrow_unsupported_reason)],
)
