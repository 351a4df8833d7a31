"""Layers that stand where others stood, and how those come back."""

from __future__ import annotations

from typing import Any

from torch import nn

REPLACED = "interlayer_replaced"  # attribute of a layer that stands where another stood: that one, out of torch's sight


def replace(model: nn.Module, path: str, layer: nn.Module) -> None:
    """Put `layer` where the module named `path` stands, and keep that one."""
    layer.__dict__[REPLACED] = (model.get_submodule(path),)
    model.set_submodule(path, layer)


def replaced_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Name and module of every layer that stands where another stood."""
    return [(name, module) for name, module in model.named_modules() if REPLACED in module.__dict__]


def put_back(model: nn.Module, kind: type[nn.Module]) -> None:
    """The layers whose places those of this `kind` took come back, as they were."""
    for path, layer in replaced_layers(model):
        if isinstance(layer, kind):
            (old,) = layer.__dict__[REPLACED]
            old.to(next(layer.parameters()).device)
            model.set_submodule(path, old)
