"""The transform of a single image: a PIL image to bytes of the network's input size, with timm's transforms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import timm
from timm.data import create_transform
from timm.data.transforms_factory import transforms_imagenet_train
from torch import nn
from torchvision import transforms

from ..recipe import Recipe


@dataclass(frozen=True)
class ImageTransform:
    """The transform of an image to the network's input.

    Args:
        size: height and width.
        mean, std: mean and standard deviation of pixel values from 0 to 1.
        interpolation: interpolation mode of resizing.
        crop_pct: the fraction of the image that the center crop of evaluation keeps.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop_pct: float

    @classmethod
    def of(cls, network: nn.Module, recipe: Recipe) -> ImageTransform:
        """Returns the transform of a recipe. Values that it does not give come from the network's configuration."""
        config = timm.data.resolve_model_data_config(network)
        return cls(
            recipe.image_size or config["input_size"][-1],
            tuple(recipe.mean or config["mean"]),
            tuple(recipe.std or config["std"]),
            recipe.interpolation,
            recipe.crop_pct or config["crop_pct"],
        )

    def evaluation(self) -> Any:
        """Returns timm's evaluation transform from a PIL image to bytes [3, size, size]."""
        return create_transform(
            (3, self.size, self.size),
            is_training=False,
            use_prefetcher=True,
            interpolation=self.interpolation,
            crop_pct=self.crop_pct,
        )

    def training(self, recipe: Recipe) -> Any:
        """Returns timm's training transform from a PIL image to bytes [3, size, size], with augmentation.

        `BatchTransform` applies the rest on the device.
        """
        crop, color, to_bytes = transforms_imagenet_train(
            self.size,
            scale=tuple(recipe.crop_scale),
            ratio=tuple(recipe.crop_ratio),
            hflip=recipe.flip,
            color_jitter=recipe.color_jitter or None,
            auto_augment=recipe.auto_augment,
            interpolation=recipe.interpolation,
            mean=self.mean,
            use_prefetcher=True,
            separate=True,
        )
        if recipe.crop != "resized":
            resize = transforms.Resize(self.size, getattr(transforms.InterpolationMode, self.interpolation.upper()))
            padded = [transforms.RandomCrop(self.size, padding=recipe.padding)] if recipe.crop == "padded" else []
            flip = transforms.RandomHorizontalFlip(recipe.flip)
            crop = transforms.Compose([resize, transforms.CenterCrop(self.size), *padded, flip])
        return transforms.Compose([crop, color, to_bytes])
