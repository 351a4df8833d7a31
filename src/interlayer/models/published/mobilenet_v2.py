"""Names in checkpoints of MobileNetV2 without RLA, which are those of torchvision: ``features.2.conv.1.0``.

The authors' programs with ECA have it as the last layer of the ``conv`` of a block.
"""

from __future__ import annotations

import re

from timm.models._efficientnet_blocks import DepthwiseSeparableConv, InvertedResidual
from torch import Tensor, nn

from .family import Family, Tensors

FIRST = {"features.0.0": "conv_stem", "features.0.1": "bn1", "classifier.1": "classifier"}
LAST = {"0": "conv_head", "1": "bn2"}
EXPANDED = {
    "0.0": "conv_pw", "0.1": "bn1", "1.0": "conv_dw", "1.1": "bn2", "2": "conv_pwl", "3": "bn3",
    "4.conv": "eca_gate.attention.conv",
}  # fmt: skip
NOT_EXPANDED = {
    "0.0": "conv_dw", "0.1": "bn1", "1": "conv_pw", "2": "bn2", "3.conv": "eca_gate.attention.conv",
}  # fmt: skip


def recognizes(tensors: Tensors, model: nn.Module) -> bool:
    return "features.0.0.weight" in tensors and "conv_stem.weight" in model.state_dict()


def rename(tensors: Tensors, model: nn.Module) -> dict[str, Tensor]:
    blocks = [
        (name, EXPANDED if isinstance(module, InvertedResidual) else NOT_EXPANDED)
        for name, module in model.named_modules()
        if isinstance(module, (InvertedResidual, DepthwiseSeparableConv))
    ]

    def renamed(module: str) -> str:
        if module in FIRST:
            return FIRST[module]
        if found := re.match(r"features\.(\d+)\.conv\.(.+)$", module):
            number = int(found[1]) - 1
            if number < len(blocks) and found[2] in blocks[number][1]:
                name, layers = blocks[number]
                return f"{name}.{layers[found[2]]}"
        if (found := re.match(r"features\.(\d+)\.([01])$", module)) and int(found[1]) == len(blocks) + 1:
            return LAST[found[2]]
        return module

    pairs = [(*name.rpartition("."), tensor) for name, tensor in tensors.items()]
    return {f"{renamed(module)}.{kind}": tensor for module, _, kind, tensor in pairs}


MOBILENET_V2 = Family("MobileNetV2", recognizes, rename)
