"""Batch norms that an operation computes from their tensors, instead of the module."""

from __future__ import annotations

from typing import Any

from timm.layers import BatchNormAct2d
from torch import nn

from .. import ops
from .modules import has_hooks, member


def norm_unsupported_reason(norm: nn.Module | None) -> str | None:
    """Returns the reason why an operation cannot compute a norm from its tensors, or None."""
    if isinstance(norm, BatchNormAct2d):
        if not (isinstance(norm.act, nn.Identity) and isinstance(norm.drop, nn.Identity)):
            return "the norm has an activation"
    elif type(norm) is not nn.BatchNorm2d:
        return f"the norm must be a BatchNorm2d, got {type(norm).__name__}"
    if not norm.affine or not norm.track_running_stats or norm.momentum is None:
        return "the norm must have weights, running statistics and a fixed momentum"
    if has_hooks(norm):
        return "the norm has hooks"
    return None


def norm_arguments(norm: Any) -> ops.BatchNormArguments:
    """Returns the arguments of a norm for which `norm_unsupported_reason` is None, and counts the batch in training."""
    if norm.training:
        member(norm, "num_batches_tracked").add_(1)
    return ops.BatchNormArguments(
        member(norm, "weight"), member(norm, "bias"), member(norm, "running_mean"),
        member(norm, "running_var"), norm.training, norm.momentum, norm.eps,
    )  # fmt: skip
