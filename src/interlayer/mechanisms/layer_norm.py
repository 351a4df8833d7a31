"""Layer norms that an operation computes from their tensors, instead of the module."""

from __future__ import annotations

from typing import Any

from torch import nn

from .. import ops
from .modules import has_hooks, member


def layer_norm_unsupported_reason(norm: nn.Module | None) -> str | None:
    """Returns the reason why an operation cannot compute a layer norm over channels from its tensors, or None."""
    if type(norm) is not nn.LayerNorm:
        return f"the norm must be a LayerNorm, got {type(norm).__name__}"
    if member(norm, "weight") is None or member(norm, "bias") is None or len(norm.normalized_shape) != 1:
        return "the norm must have a weight and a bias for each channel"
    if has_hooks(norm):
        return "the norm has hooks"
    return None


def layer_norm_arguments(norm: Any) -> ops.LayerNormArguments:
    """Returns the arguments of a norm for which `layer_norm_unsupported_reason` is None."""
    return ops.LayerNormArguments(member(norm, "weight"), member(norm, "bias"), norm.eps)
