"""Images annotated with objects: boxes, labels and masks, as torchvision's tv_tensors.

The readers (coco.py, voc.py, mask_folders.py) check all annotations when they open a dataset. `AnnotationProblems`
collects what cannot be used, by file and number; with the data option `bad=fail` one error names the first and the
count, with `bad=skip` these objects and images are left out and counted. What only shows when pixels are read, such as
an image of another size than its annotations state, raises an `AnnotationError` for that image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors

from ..files import TrainingError
from .images import Images, Problems, open_rgb

ROUNDING = 1.0  # boxes may exceed their image by one pixel, to which they are clipped: annotations are often rounded
SKIP_OPTION = "data_options.bad=skip"


class AnnotationError(ValueError):
    """Raised if the annotations of one image cannot be used. The message is a sentence about the image."""


class ObjectMask(Protocol):
    """The mask of an object, stored in any form."""

    def decode(self) -> np.ndarray:
        """Returns the mask, booleans [H, W]."""


@dataclass(frozen=True)
class AnnotatedObject:
    """One object of an image.

    Args:
        name: names the annotation to a user: its file and number.
        label: the class index.
        box: left, top, right and bottom in pixels; the right and the bottom edge are outside the object.
        area: the area in pixels by which metrics distinguish small and large objects; that of the box if None.
        mask: the mask; None if the dataset has only boxes.
        crowd: whether it is a group of objects or a difficult one. Metrics neither require nor punish its detection.
    """

    name: str
    label: int
    box: tuple[float, float, float, float]
    area: float | None = None
    mask: ObjectMask | None = None
    crowd: bool = False


@dataclass(frozen=True)
class AnnotatedImage:
    """One image and its objects.

    Args:
        name: names the image to a user: the file of its annotations and its number there, or the image file.
        file: the image file.
        image_id: the id of the image, unique in its dataset.
        height, width: the size of the image.
    """

    name: str
    file: Path
    image_id: int
    height: int
    width: int
    objects: list[AnnotatedObject] = field(default_factory=list)


class AnnotatedImages(Images):
    """Images with boxes, and with masks if their dataset has any.

    Args:
        images: the images.
        classes: class names, by label.
        crowds: whether targets contain crowds, as evaluation needs them. Training leaves them out.

    Attributes:
        labels: zeros, because the classes belong to the objects.
        has_masks: whether the dataset has masks.
    """

    def __init__(self, images: Sequence[AnnotatedImage], classes: Sequence[str], *, crowds: bool = False) -> None:
        super().__init__(np.zeros(len(images), dtype=np.int64), classes)
        self.images, self.crowds = list(images), crowds
        self.has_masks = any(entry.mask is not None for image in self.images for entry in image.objects)

    @property
    def aspect_ratios(self) -> Tensor:
        """The width of each image divided by its height, [N]."""
        return torch.tensor([image.width / image.height for image in self.images])

    def name(self, index: int) -> str:
        return str(self.images[index].file)

    def open(self, index: int) -> Image.Image:
        image = self.images[index]
        pixels = open_rgb(image.file)
        if pixels.size != (image.width, image.height):
            raise AnnotationError(
                f"it has {pixels.width} x {pixels.height} pixels, but its annotations are of {image.width} x "
                f"{image.height}"
            )
        return pixels

    def target(self, index: int) -> dict[str, Any]:
        """Returns the target of an image with N objects.

        Its entries are boxes [N, 4] (XYXY), labels [N], area [N], iscrowd [N], image_id [] and, if the dataset has
        masks, masks [N, H, W].
        """
        image = self.images[index]
        objects = [entry for entry in image.objects if self.crowds or not entry.crowd]
        size = image.height, image.width
        corners = torch.tensor([entry.box for entry in objects], dtype=torch.float32).view(-1, 4)
        boxes = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=size)
        areas = [_box_area(entry.box) if entry.area is None else entry.area for entry in objects]
        target: dict[str, Any] = {
            "boxes": boxes,
            "labels": torch.tensor([entry.label for entry in objects], dtype=torch.int64),
            "area": torch.tensor(areas, dtype=torch.float32),
            "iscrowd": torch.tensor([entry.crowd for entry in objects], dtype=torch.int64),
            "image_id": torch.tensor(image.image_id),
        }
        if self.has_masks:
            target["masks"] = tv_tensors.Mask(torch.from_numpy(_decode(objects, size)))
        return target


def _box_area(box: tuple[float, float, float, float]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _decode(objects: Sequence[AnnotatedObject], size: tuple[int, int]) -> np.ndarray:
    """Returns the masks of objects, booleans [N, H, W]."""
    masks = np.zeros((len(objects), *size), dtype=bool)
    for index, entry in enumerate(objects):
        if entry.mask is None:
            raise AnnotationError(f"{entry.name} has no mask, but other objects of its dataset have one")
        masks[index] = entry.mask.decode()
    return masks


class AnnotationProblems:
    """Collects the annotations of a dataset that cannot be used, to report all of them at once.

    Args:
        problems: receives them when `report` is called.
    """

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.found: dict[str, str] = {}
        self.images: set[str] = set()

    def add(self, name: str, reason: str, image: str | None = None) -> None:
        """Records an annotation. The first reason is kept if there are several.

        Args:
            name: the file and the number of the annotation.
            reason: a sentence about it.
            image: the name of its image, which lacks an object if the annotation is skipped.
        """
        self.found.setdefault(name, reason)
        if image is not None:
            self.images.add(image)

    def report(self) -> None:
        """Raises a `TrainingError` with the first one and their number, or records them as skipped."""
        self.problems.add(self.found, noun="annotation")


def annotation_problems(bad: str) -> Problems:
    """Returns the collector of problems for the data option `bad`: fail or skip."""
    if bad not in ("fail", "skip"):
        raise TrainingError(f"data_options.bad={bad}: expected fail or skip")
    return Problems(bad, skip_option=SKIP_OPTION)


def usable_box(box: Sequence[Any], height: int, width: int) -> tuple[float, float, float, float]:
    """Returns a box (left, top, right, bottom) as floats, clipped by at most one pixel to its image.

    Raises:
        AnnotationError: if the box has no area, is outside the image, or is not four finite numbers.
    """
    if len(box) != 4 or not all(isinstance(edge, (int, float)) and math.isfinite(edge) for edge in box):
        raise AnnotationError(f"its box {list(box)} is not four finite numbers")
    left, top, right, bottom = map(float, box)
    shown = f"its box from ({left:g}, {top:g}) to ({right:g}, {bottom:g})"
    if right <= left or bottom <= top:
        raise AnnotationError(f"{shown} has no area")
    if min(left, top) < -ROUNDING or right > width + ROUNDING or bottom > height + ROUNDING:
        raise AnnotationError(f"{shown} is outside its image of {width} x {height} pixels")
    clipped = max(left, 0.0), max(top, 0.0), min(right, float(width)), min(bottom, float(height))
    if clipped[2] <= clipped[0] or clipped[3] <= clipped[1]:
        raise AnnotationError(f"{shown} is outside its image of {width} x {height} pixels")
    return clipped


def with_objects(
    images: Sequence[AnnotatedImage], found: AnnotationProblems, *, keep_empty: bool = False
) -> list[AnnotatedImage]:
    """Returns the images that have objects and records the others.

    Args:
        images: all images of a dataset.
        found: collects the images without objects.
        keep_empty: whether images without objects are kept instead, as evaluation needs them: what is detected there
            is wrong. An image that lost all its objects because they cannot be used is left out all the same.
    """
    kept = []
    for image in images:
        if any(not entry.crowd for entry in image.objects) or (keep_empty and image.name not in found.images):
            kept.append(image)
        else:
            found.add(image.name, "it has no objects that can be used")
    return kept
