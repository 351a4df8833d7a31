"""Layers that stand where others stood, and how those come back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ...mechanisms import UniformHeadAttention
from ..finding.probe import match

REPLACED = "interlayer_replaced"  # attribute of a layer that stands where another stood: that one, out of torch's sight


def replace(model: nn.Module, path: str, layer: nn.Module) -> None:
    """Put `layer` where the module named `path` stands, and keep that one."""
    layer.__dict__[REPLACED] = (model.get_submodule(path),)
    model.set_submodule(path, layer)


def replaced_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Name and module of every layer that stands where another stood."""
    return [(name, module) for name, module in model.named_modules() if REPLACED in module.__dict__]


def put_back(model: nn.Module, kind: type[nn.Module]) -> None:
    """The layers whose places those of this `kind` took come back with their own weights."""
    for path, layer in replaced_layers(model):
        if isinstance(layer, kind):
            (old,) = layer.__dict__[REPLACED]
            if any(tensor.is_meta for tensor in old.state_dict().values()):
                old.to_empty(device=next(layer.parameters()).device)  # it never had weights
            match(old, layer)
            model.set_submodule(path, old)


def names_of_replaced(model: nn.Module, state_dict: Mapping[str, Tensor]) -> list[str]:
    """The entries of a plain backbone's weights that belong to layers which were replaced."""
    return [name for _, names in _with_all_weights(model, state_dict) for name in names]


def hand_to_replaced(model: nn.Module, state_dict: Mapping[str, Tensor]) -> list[str]:
    """Give a plain backbone's weights to the layers that were replaced: they come back with them.

    Attention with a uniform head starts from what it keeps of them. Layers whose weights are not all there, or of
    another shape, are left as they are. Returns the names that were taken.
    """
    for layer, names in _with_all_weights(model, state_dict):
        (old,) = layer.__dict__[REPLACED]
        old.load_state_dict(dict(zip(old.state_dict(), (state_dict[name] for name in names), strict=True)))
        if isinstance(layer, UniformHeadAttention):
            layer.take_over(old.qkv, old.proj)
    return names_of_replaced(model, state_dict)


def _with_all_weights(model: nn.Module, state_dict: Mapping[str, Tensor]) -> Iterator[tuple[Any, list[str]]]:
    """Layers that replaced others whose weights are in `state_dict`, and the names of those."""
    for path, layer in replaced_layers(model):
        own = {f"{path}.{name}": tensor for name, tensor in layer.__dict__[REPLACED][0].state_dict().items()}
        if all(name in state_dict and state_dict[name].shape == tensor.shape for name, tensor in own.items()):
            yield layer, list(own)
