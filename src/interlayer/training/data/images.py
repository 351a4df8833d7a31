"""Map-style image sources: any image can be read by its index, and all labels are known in advance.

`Problems` collects what cannot be used: files that are not images, empty classes, labels out of range. Nothing is
skipped silently: each problem is recorded by name, and stops the run unless the recipe has `on_bad_image: skip`.
"""

from __future__ import annotations

import io
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from ..files import TrainingError

logger = logging.getLogger(__name__)
SHOWN = 5  # number of names in a message; summary.json lists all of them


@dataclass(frozen=True)
class Unusable:
    """Replaces an image that could not be read. An exception would reach the user as the traceback of a worker."""

    name: str
    reason: str


def unreadable(error: Exception) -> str:
    """Returns why an image cannot be used, given the exception that reading it raised."""
    if isinstance(error, UnidentifiedImageError):  # its message is only the path of the file
        return "it cannot be read as an image"
    return f"it cannot be read as an image ({' '.join(str(error).split())[:120] or type(error).__name__})"


def label_outside(label: int, classes: int) -> str:
    """Returns why an image with a label that is not a class index cannot be used."""
    return f"its label {label} is outside 0 to {classes - 1}"


class Problems:
    """Images that cannot be used, with the reasons. Adding one raises unless the recipe allows them.

    Args:
        on_bad_image: whether adding an image raises an error ("fail") or records it ("skip").
        skip_option: the option that skips such images, for the message of the error.
    """

    def __init__(self, on_bad_image: str, *, skip_option: str = "on_bad_image=skip") -> None:
        self.allowed, self.skip_option = on_bad_image == "skip", skip_option
        self.found: dict[str, str] = {}

    def add(self, found: dict[str, str], *, only_this_rank: bool = False, noun: str = "image") -> None:
        """Records images that cannot be used.

        Args:
            found: the reasons, by the names of the images.
            only_this_rank: whether other ranks do not meet the same images, so that this rank must report them.
            noun: what the names stand for, if not images.

        Raises:
            TrainingError: if the recipe does not allow them.
        """
        new = {name: reason for name, reason in found.items() if name not in self.found}
        self.found.update(new)
        if not new:
            return
        first = next(iter(new))
        count = f"{len(new)} {noun}s cannot be used; the first is {first}"
        count = count if len(new) > 1 else f"{first} cannot be used"
        if not self.allowed:
            raise TrainingError(
                f"{count}: {new[first]}; repair or remove it, or skip such {noun}s with {self.skip_option}"
            )
        others = list(new)[1:SHOWN]
        also = f" (also {', '.join(others)})" if others else ""
        logger.warning("%s: %s%s; skipped", count, new[first], also, extra={"only_this_rank": only_this_rank})

    def add_unusable(self, unusable: Sequence[Unusable]) -> None:
        """Records the images of a batch that cannot be used. See `add`."""
        self.add({image.name: image.reason for image in unusable}, only_this_rank=True)


class Images(ABC):
    """A map-style source.

    Args:
        labels: class indices, [N].
        classes: class names, by label.

    Attributes:
        resident: copies of this source on a device (`ResidentImages`), by transform, task and device. The runs of a
            comparison share a source and therefore share these copies.
    """

    def __init__(self, labels: np.ndarray, classes: Sequence[str]) -> None:
        self.labels = np.asarray(labels)
        self.classes = classes
        self.resident: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def aspect_ratios(self) -> Tensor | None:
        """The width of each image divided by its height, [N], if batches are to have similar ones; otherwise None."""
        return None

    @abstractmethod
    def name(self, index: int) -> str:
        """Returns a name that identifies the image to a user."""

    @abstractmethod
    def open(self, index: int) -> Image.Image:
        """Returns the image as RGB. Raises if it cannot be read."""

    def target(self, index: int) -> Any:
        """Returns the target of an image, which the task's `collate` accepts. The default is the label."""
        return int(self.labels[index])


class ArrayImages(Images):
    """Images stored in one array of bytes, [N, H, W, 3]."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, classes: Sequence[str], what: str) -> None:
        super().__init__(labels, classes)
        self.pixels, self.what = pixels, what

    def name(self, index: int) -> str:
        return f"{self.what} image {index}"

    def open(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index])


@dataclass(frozen=True)
class EncodedImage:
    """The contents of an image file that was not read from a folder, such as from standard input."""

    name: str
    content: bytes

    def __str__(self) -> str:
        return self.name


class FileImages(Images):
    """Image files without labels."""

    def __init__(self, files: Sequence[Path | EncodedImage]) -> None:
        super().__init__(np.zeros(len(files), dtype=np.int64), [])
        self.files = list(files)

    def name(self, index: int) -> str:
        return str(self.files[index])

    def open(self, index: int) -> Image.Image:
        file = self.files[index]
        return open_rgb(io.BytesIO(file.content) if isinstance(file, EncodedImage) else file)


class Subset(Images):
    """A subset of the images of a source."""

    def __init__(self, images: Images, indices: Sequence[int] | np.ndarray) -> None:
        self.images, self.indices = images, np.asarray(indices, dtype=np.int64)
        super().__init__(images.labels[self.indices], images.classes)

    @property
    def aspect_ratios(self) -> Tensor | None:
        ratios = self.images.aspect_ratios
        return None if ratios is None else ratios[torch.from_numpy(self.indices)]

    def name(self, index: int) -> str:
        return self.images.name(int(self.indices[index]))

    def open(self, index: int) -> Image.Image:
        return self.images.open(int(self.indices[index]))

    def target(self, index: int) -> Any:
        return self.images.target(int(self.indices[index]))


def open_rgb(file: str | os.PathLike[str] | IO[bytes]) -> Image.Image:
    """Reads an image file completely, as `as_rgb` describes. Raises if it is not an image."""
    with Image.open(file) as image:
        return as_rgb(image)


def as_rgb(image: Image.Image) -> Image.Image:
    """Converts an image to RGB bytes, as an image viewer shows it. All sources and commands read images this way.

    The rotation in the EXIF data is applied. Transparent pixels are shown on white. Of 16-bit pixels the high byte is
    kept, as Pillow does for 16-bit RGB. Floating-point pixels are from 0 to 1, or from 0 to 255. Embedded color
    profiles are not applied, as in timm.
    """
    image.load()
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(_as_bytes(np.asarray(image))).convert("RGB")
    if image.mode in ("LA", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _as_bytes(pixels: np.ndarray) -> np.ndarray:
    """Converts grayscale pixels [H, W] of more than 8 bits to bytes."""
    low, high = pixels.min(), pixels.max()
    if np.issubdtype(pixels.dtype, np.floating):
        if not (low >= 0 and high <= 255):  # also refuses NaN
            raise ValueError(f"its floating-point pixels are from {low:g} to {high:g}, expected 0 to 1 or 0 to 255")
        return np.rint(pixels * 255 if high <= 1 else pixels).astype(np.uint8)
    if low < 0 or high >= 2**16:
        raise ValueError(f"its pixels are 32-bit integers from {low} to {high}, expected at most 16 bits")
    return (pixels >> 8).astype(np.uint8)
