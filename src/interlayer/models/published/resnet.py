"""Names of ResNets with stages numbered from zero, ``stages.0.1.conv1``, as in the published MRLA-base.

timm numbers them from one, ``layer1.1.conv1``.
"""

from __future__ import annotations

import re

from torch import Tensor, nn

from .family import Family, Tensors, rename_by

STAGE = r"^stages\.(\d)\."


def recognizes(tensors: Tensors, model: nn.Module) -> bool:
    return "layer1.0.conv1.weight" in model.state_dict() and any(re.match(STAGE, name) for name in tensors)


def rename(tensors: Tensors, model: nn.Module) -> dict[str, Tensor]:
    return rename_by([(STAGE, lambda found: f"layer{int(found[1]) + 1}.")], tensors)


RESNET = Family("ResNet", recognizes, rename)
