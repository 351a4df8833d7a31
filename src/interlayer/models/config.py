"""Configurations of the models of this library, in the format of timm."""

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, get_pretrained_cfg, register_model
from torch import nn

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def default_config(**changes: Any) -> dict[str, Any]:
    """Returns a configuration without weights, by default for 1000 classes, 224 pixels and ImageNet normalization."""
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
    """Returns the configuration of timm's model `backbone`, without its weights."""
    ours = default_config()
    theirs = get_pretrained_cfg(backbone)
    if theirs is None:
        raise ValueError(f"timm knows no configuration of {backbone!r}")
    return {**{key: getattr(theirs, key) for key in ours if key != "url"}, "url": "", **changes}


def cifar_config(**changes: Any) -> dict[str, Any]:
    """Returns the configuration of a network for CIFAR-10 with the classifier `head`."""
    return default_config(
        num_classes=10,
        input_size=(3, 32, 32),
        crop_pct=1.0,
        mean=CIFAR_MEAN,
        std=CIFAR_STD,
        classifier="head",
        **changes,
    )


def register_network(name: str, network: type[nn.Module], options: dict[str, Any], *, stages: int) -> None:
    """Registers a network with timm. Its feature maps are the outputs of its `stages` stages."""

    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        feature_cfg = {"out_indices": tuple(range(stages)), "feature_cls": "getter"}
        return build_model_with_cfg(network, name, pretrained, feature_cfg=feature_cfg, **{**options, **kwargs})

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__doc__ = f"{network.__name__} with {options}."
    entrypoint.__module__ = network.__module__  # timm looks for `default_cfgs` there
    register_model(entrypoint)
