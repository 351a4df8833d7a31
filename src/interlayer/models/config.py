"""timm's model configuration for the models of this library."""

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import get_pretrained_cfg


def default_config(**changes: Any) -> dict[str, Any]:
    """A configuration without weights: ImageNet's normalisation, 1000 classes, 224 pixels, unless changed."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": None,
        "classifier": None,
        **changes,
    }


def config_like(backbone: str, **changes: Any) -> dict[str, Any]:
    """The input and head of timm's model `backbone`, without its weights."""
    ours = default_config()
    theirs = get_pretrained_cfg(backbone)
    if theirs is None:
        raise ValueError(f"timm knows no configuration of {backbone!r}")
    return {**{key: getattr(theirs, key) for key in ours if key != "url"}, "url": "", **changes}
