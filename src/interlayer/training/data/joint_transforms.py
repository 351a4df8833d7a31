"""Transforms of an image together with its boxes and masks, with torchvision's v2 transforms.

Each training image is resized once, here: `interlayer.models.dense.padded.NormalizedImages` does not resize it again.
Evaluation leaves images and targets as they are: the detector resizes the image once, on the device, and returns boxes
and masks of the original size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from ...tasks import Task
from ...tasks.label_maps import IGNORED
from ...tasks.overlaid_masks import overlay_masks
from ..keys import RecipeError
from ..recipe import Recipe
from .annotated import AnnotationError
from .images import Images, Unusable, unreadable
from .seeds import temporary_seed

SHORT_SIDE, LONG_SIDE = 800, 1333
SIDE_STEP = 64  # pixels between two lengths of the shorter side of a whole image
HALONET_JITTER = (4 / 5, 5 / 4)


@dataclass(frozen=True)
class JointTransform:
    """The transform of training images with their boxes and masks.

    Args:
        short_sides: the lengths of the shorter side, one of which is drawn for each image (multi-scale jitter).
        long_side: the largest length of the longer side, which takes precedence.
        crop: height and width of the output, if images are scaled at random and then cropped or padded to one size,
            as in HaloNet; None if their shorter side is resized.
        scale_jitter: the range of the random scale with `crop`, relative to the scale at which the image just fits.
        flip: probability of a horizontal flip.
        vertical_flip: probability of a vertical flip.
        mask_fill: the value of masks where a crop is padded: 0 for instances, the ignored label for label maps.
        windows: whether images to be cropped are resized by `short_sides` instead of `scale_jitter`.
        color_jitter: strength of random changes of brightness, contrast and saturation.
    """

    short_sides: Sequence[int] = (SHORT_SIDE,)
    long_side: int = LONG_SIDE
    crop: int | None = None
    scale_jitter: tuple[float, float] = HALONET_JITTER
    flip: float = 0.5
    vertical_flip: float = 0.0
    mask_fill: int = 0
    windows: bool = False
    color_jitter: float = 0.0

    @classmethod
    def of(cls, recipe: Recipe, task: Task) -> JointTransform:
        """Returns the transform of a recipe for the annotations of its task."""
        low, high = recipe.shorter_side
        # Whole images have one of a few sizes: cuDNN prepares its convolutions anew for each size of a batch.
        step = SIDE_STEP if recipe.crop == "none" else 1
        return cls(
            sorted({*range(low, high, step), high}),
            recipe.longer_side,
            None if recipe.crop == "none" else recipe.image_size,
            (recipe.scale_jitter[0], recipe.scale_jitter[1]),
            recipe.flip,
            recipe.vertical_flip,
            IGNORED if task.annotations == "label_maps" else 0,
            recipe.crop == "scaled",
            recipe.color_jitter,
        )

    def __post_init__(self) -> None:
        low, high = self.scale_jitter
        if not 0 < low <= high:
            raise RecipeError(f"expected a scale jitter of two increasing positive numbers, got {self.scale_jitter}")
        if not self.short_sides or min(self.short_sides) < 1 or max(self.short_sides) > self.long_side:
            raise RecipeError(
                f"expected positive short sides of at most long_side={self.long_side}, got {list(self.short_sides)}"
            )

    def training(self) -> nn.Module:
        """Returns the transform of (image, target), in which the target is a dictionary with boxes, or a label map.

        In the target that it returns, masks are ``maps`` and ``numbers``: see `interlayer.tasks.overlaid_masks`.
        """
        flips = [v2.RandomHorizontalFlip(self.flip), v2.RandomVerticalFlip(self.vertical_flip)]
        return v2.Compose([OverlayMasks(), *self._resize(), *flips, *self._colors(), DropLostObjects()])

    def _colors(self) -> list[nn.Module]:
        strength = self.color_jitter
        return [v2.ColorJitter(strength, strength, strength)] if strength else []

    def _resize(self) -> list[nn.Module]:
        sides = v2.RandomShortestSize(list(self.short_sides), max_size=self.long_side, antialias=True)
        if self.crop is None:
            return [sides]
        size = self.crop, self.crop
        fill = {tv_tensors.Image: 0, tv_tensors.Mask: self.mask_fill}
        jitter = v2.ScaleJitter(size, scale_range=self.scale_jitter, antialias=True)
        return [sides if self.windows else jitter, v2.RandomCrop(size, pad_if_needed=True, fill=fill)]


class OverlayMasks(nn.Module):
    """Replaces the masks of objects by ``maps`` and ``numbers``: see `interlayer.tasks.overlaid_masks`."""

    def forward(self, image: Any, target: Any) -> tuple[Any, Any]:
        if not isinstance(target, dict) or "masks" not in target:
            return image, target
        others = {key: value for key, value in target.items() if key != "masks"}
        maps = overlay_masks(target["masks"].as_subclass(Tensor))
        numbers = torch.arange(1, 1 + len(target["masks"]), dtype=torch.int32)
        return image, {**others, "maps": tv_tensors.Mask(maps), "numbers": numbers}


class DropLostObjects(nn.Module):
    """Removes the objects of which a crop left less than a pixel, with their labels. Keeps label maps."""

    def __init__(self) -> None:
        super().__init__()
        self.sanitize = v2.SanitizeBoundingBoxes(min_size=1, labels_getter=_entries_of_objects)

    def forward(self, image: Any, target: Any) -> tuple[Any, Any]:
        if not isinstance(target, dict):
            return image, target
        maps = {key: value.as_subclass(Tensor) for key, value in target.items() if key == "maps"}  # not one per object
        return self.sanitize(image, {**target, **maps})


def _entries_of_objects(sample: tuple[Any, dict[str, Any]]) -> tuple[Tensor, ...]:
    """Returns the entries of a target that have a value for each object, apart from boxes."""
    return tuple(sample[1][key] for key in ("labels", "area", "iscrowd", "numbers") if key in sample[1])


class LoadedSamples(Dataset):
    """A dataset of images with boxes or masks, indexed as `LoadedImages` by (seed of the augmentation, index).

    Args:
        images: the source.
        transform: the transform of (image, target); None in evaluation.
    """

    def __init__(self, images: Images, transform: nn.Module | None) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        """Returns bytes [3, H, W], the target and the index; None for padding; `Unusable` if it cannot be used."""
        seed, index = key
        if index < 0:
            return None
        try:
            image = tv_tensors.Image(v2.functional.pil_to_tensor(self.images.open(index)))
            target = self.images.target(index)
        except AnnotationError as error:
            return Unusable(self.images.name(index), str(error))
        except Exception as error:
            return Unusable(self.images.name(index), unreadable(error))
        if self.transform is not None:
            with temporary_seed(seed):
                image, target = self.transform(image, target)
        return image.as_subclass(torch.Tensor), target, index
