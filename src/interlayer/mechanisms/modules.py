"""What an operation that computes a module from its tensors needs of it: its tensors, and whether it has hooks."""

from __future__ import annotations

from typing import Any

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Returns whether somebody wants to be told of calls or gradients of a module, which the operation would not do."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def member(module: nn.Module, name: str) -> Any:
    """Returns ``getattr(module, name)`` for the name of a parameter, buffer or submodule.

    A layer reads twenty of them, and `nn.Module` takes half a microsecond to find each: it first lets Python look for
    an attribute. Parametrizations and sharding make attributes of parameters.
    """
    found: Any = module._parameters.get(name)
    if found is None:
        found = module._modules.get(name)
    if found is None:
        found = module._buffers.get(name)
    return getattr(module, name) if found is None else found
