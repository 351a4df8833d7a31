"""Layer norms that an operation computes from their tensors, instead of the module."""

from __future__ import annotations

from typing import Any

from torch import nn

from .. import ops
from .hooks import has_hooks


def layer_norm_unsupported_reason(norm: nn.Module | None) -> str | None:
    """Returns the reason why an operation cannot compute a layer norm over channels from its tensors, or None."""
    if type(norm) is not nn.LayerNorm:
        return f"the norm must be a LayerNorm, got {type(norm).__name__}"
    if norm.weight is None or norm.bias is None or len(norm.normalized_shape) != 1:
        return "the norm must have a weight and a bias for each channel"
    if has_hooks(norm):
        return "the norm has hooks"
    return None


def layer_norm_arguments(norm: Any) -> ops.LayerNormArguments:
    """Returns the arguments of a norm for which `layer_norm_unsupported_reason` is None."""
    return ops.LayerNormArguments(norm.weight, norm.bias, norm.eps)
