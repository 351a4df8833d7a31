"""The transform of a single image: a PIL image to bytes of the network's input size, with timm's transforms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor, nn
from torchvision import transforms

from ..keys import RecipeError
from ..recipe import Recipe
from .images import as_rgb


@dataclass(frozen=True)
class ImageTransform:
    """The transform of an image to the network's input.

    Args:
        size: height and width.
        mean, std: mean and standard deviation of pixel values from 0 to 1.
        interpolation: interpolation mode of resizing.
        crop_pct: the fraction of the image that the center crop of evaluation keeps.
        crop_mode: timm's name of how evaluation crops: center, border or squash.

    Calling it applies the transform of evaluation to one image.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop_pct: float
    crop_mode: str = "center"

    @classmethod
    def of(cls, network: nn.Module, recipe: Recipe, size: int | None = None) -> ImageTransform:
        """Returns the transform of a recipe. Values that it does not give come from the network's configuration.

        Args:
            network: has the configuration.
            size: height and width, if they are not those of the recipe.
        """
        config = timm.data.resolve_model_data_config(network)
        return cls(
            size or recipe.image_size or config["input_size"][-1],
            tuple(recipe.mean or config["mean"]),
            tuple(recipe.std or config["std"]),
            recipe.interpolation,
            recipe.crop_pct or config["crop_pct"],
        )

    def __call__(self, image: Image.Image) -> Tensor:
        """Returns an image of any size and mode as the normalized input of the network, [3, size, size]."""
        pixels = torch.as_tensor(np.asarray(self.evaluation()(as_rgb(image))))
        mean, std = (torch.tensor(values).view(-1, 1, 1) * 255 for values in (self.mean, self.std))
        return (pixels.float() - mean) / std

    def evaluation(self) -> Any:
        """Returns timm's evaluation transform from a PIL image to bytes [3, size, size]."""
        return create_transform(
            (3, self.size, self.size),
            is_training=False,
            use_prefetcher=True,
            interpolation=self.interpolation,
            crop_pct=self.crop_pct,
            crop_mode=self.crop_mode,
            mean=self.mean,  # fills the borders of crop_mode="border"
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
            flip = transforms.RandomHorizontalFlip(recipe.flip)
            crop = transforms.Compose([*self._resize_and_crop(recipe), flip])
        return transforms.Compose([crop, color, to_bytes])

    def _resize_and_crop(self, recipe: Recipe) -> list[Any]:
        """Returns torchvision's transforms for the values of `crop` that timm has no transform for."""
        mode = getattr(transforms.InterpolationMode, self.interpolation.upper())
        if recipe.crop == "scaled":
            low, high = recipe.shorter_side
            if low < self.size:
                wanted = [round(side * self.size / 224) for side in (256, 480)]
                raise RecipeError(
                    f"crop=scaled with shorter_side={recipe.shorter_side} gives images of {low} pixels, too small for "
                    f"crops of {self.size}: set shorter_side={wanted} or crop=resized"
                )
            resize = transforms.RandomChoice([transforms.Resize(side, mode) for side in range(low, high + 1)])
            return [resize, transforms.RandomCrop(self.size)]
        padded = [transforms.RandomCrop(self.size, padding=recipe.padding)] if recipe.crop == "padded" else []
        return [transforms.Resize(self.size, mode), transforms.CenterCrop(self.size), *padded]
