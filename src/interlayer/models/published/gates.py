"""Names of squeeze-and-excitation and ECA in the published ResNets, with and without RLA.

The names of the ResNet are those of timm, ``layer1.0.conv1``. A block has ``se.fc.0`` and ``se.fc.2``, which are linear
layers, or ``eca.conv``. In this library they are timm's ``se`` of a block, or the attached ``se_gate`` or ``eca_gate``.
"""

from __future__ import annotations

import re

from torch import Tensor, nn

from .family import Family, Tensors

LAYERS = {"se.fc.0": "fc1", "se.fc.2": "fc2", "eca.conv": "conv"}
NAME = re.compile(rf"^(.+)\.({'|'.join(map(re.escape, LAYERS))})\.(\w+)$")


def recognizes(tensors: Tensors, model: nn.Module) -> bool:
    return any(NAME.match(name) for name in tensors)


def rename(tensors: Tensors, model: nn.Module) -> dict[str, Tensor]:
    names = model.state_dict().keys()

    def renamed(name: str) -> str:
        found = NAME.match(name)
        if found is None:
            return name
        block, layer, kind = found.groups()
        gate = f"{layer.partition('.')[0]}_gate.attention"
        candidates = [f"{block}.{place}.{LAYERS[layer]}.{kind}" for place in ("se", gate)]
        return next((candidate for candidate in candidates if candidate in names), name)

    return {renamed(name): tensor for name, tensor in tensors.items()}


GATES = Family("SE and ECA", recognizes, rename)
