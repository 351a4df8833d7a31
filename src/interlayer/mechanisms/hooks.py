"""Hooks of modules, which an operation that computes a module from its tensors would not call."""

from __future__ import annotations

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Returns whether somebody wants to be told of calls or gradients of a module."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
