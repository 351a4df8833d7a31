"""Replaces layers of a network, and restores them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ...mechanisms import UniformHeadAttention
from ...mechanisms.augmented import AugmentedConv2d
from ..finding.probe import match

REPLACED = "interlayer_replaced"  # attribute of a replacement: a tuple with the original layer


def replace(model: nn.Module, path: str, layer: nn.Module) -> None:
    """Replace the module named `path` by `layer`, which keeps a reference to it."""
    layer.__dict__[REPLACED] = (model.get_submodule(path),)
    model.set_submodule(path, layer)


def replaced_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Returns name and module of every layer that replaced another one."""
    return [(name, module) for name, module in model.named_modules() if REPLACED in module.__dict__]


def put_back(model: nn.Module, kind: type[nn.Module]) -> None:
    """Restore the layers that were replaced by layers of this `kind`, with their own weights."""
    for path, layer in replaced_layers(model):
        if isinstance(layer, kind):
            (old,) = layer.__dict__[REPLACED]
            if any(tensor.is_meta for tensor in old.state_dict().values()):
                old.to_empty(device=next(layer.parameters()).device)  # its weights were never initialized
            match(old, layer)
            model.set_submodule(path, old)


def names_of_replaced(model: nn.Module, state_dict: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of a plain backbone's weights that belong to replaced layers."""
    return [name for _, names in _with_all_weights(model, state_dict) for name in names]


def hand_to_replaced(model: nn.Module, state_dict: Mapping[str, Tensor]) -> list[str]:
    """Load a plain backbone's weights into the layers that were replaced, and return the names of these weights.

    `put_back` restores the layers with these weights. `UniformHeadAttention` and the convolution of
    `AugmentedConv2d` are initialized from them. A layer is skipped if a weight is missing or has another shape.
    """
    for layer, names in _with_all_weights(model, state_dict):
        (old,) = layer.__dict__[REPLACED]
        old.load_state_dict(dict(zip(old.state_dict(), (state_dict[name] for name in names), strict=True)))
        if isinstance(layer, UniformHeadAttention):
            layer.take_over(old.qkv, old.proj)
        elif isinstance(layer, AugmentedConv2d):
            layer.take_over(old)
    return names_of_replaced(model, state_dict)


def _with_all_weights(model: nn.Module, state_dict: Mapping[str, Tensor]) -> Iterator[tuple[Any, list[str]]]:
    """Yields the replacement of every layer with all its weights in `state_dict`, and the names of these weights."""
    for path, layer in replaced_layers(model):
        own = {f"{path}.{name}": tensor for name, tensor in layer.__dict__[REPLACED][0].state_dict().items()}
        if all(name in state_dict and state_dict[name].shape == tensor.shape for name, tensor in own.items()):
            yield layer, list(own)
