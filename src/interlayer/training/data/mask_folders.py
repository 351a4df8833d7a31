"""Images with mask PNGs: instances or label maps.

    FOLDER/images/SPLIT/NAME.jpg             the images; without splits, FOLDER/images/NAME.jpg
    FOLDER/masks/SPLIT/NAME.png              instances: the pixels of object k are k, those of the background 0
    FOLDER/masks/SPLIT/NAME/ANY.png          instances: one file for each object, whose pixels are not 0
    FOLDER/masks/SPLIT/NAME/CLASS/ANY.png    the same, of several classes
    FOLDER/masks/SPLIT/NAME.png              label maps: each pixel is the index of its class

Grayscale and palette PNGs are read as their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy import ndimage
from torchvision import tv_tensors

from ...tasks.label_maps import IGNORED
from ..files import TrainingError
from .annotated import AnnotatedImage, AnnotatedImages, AnnotatedObject, AnnotationError, AnnotationProblems
from .annotated import with_objects as images_with_objects
from .images import Images, Problems, open_rgb, unreadable
from .splits import files_under, is_image

OBJECT = "object"  # the class of instances whose folders name none


@lru_cache(maxsize=2)  # the objects of an image share a file
def read_numbers(file: Path) -> np.ndarray:
    """Returns the numbers of a mask file, [H, W]. Raises an `AnnotationError` if it has colors instead."""
    try:
        with Image.open(file) as image:
            numbers = np.asarray(image)
    except Exception as error:
        raise AnnotationError(f"its mask {file}: {unreadable(error)}") from error
    if numbers.ndim != 2:
        raise AnnotationError(f"its mask {file} has {numbers.shape[2]} channels, expected grayscale or a palette")
    return numbers


@dataclass(frozen=True)
class MaskFile:
    """The mask of an object in a PNG.

    Args:
        file: the PNG.
        number: the value of the pixels of the object; None for all that are not 0.
    """

    file: Path
    number: int | None = None

    def decode(self) -> np.ndarray:
        """Returns the mask, booleans [H, W]."""
        numbers = read_numbers(self.file)
        return numbers != 0 if self.number is None else numbers == self.number


def _pairs(images_folder: Path, masks_folder: Path, found: AnnotationProblems) -> Iterator[tuple[Path, Path, int, int]]:
    """Yields each image, its mask (a PNG or a folder), and the height and width of the image."""
    for folder in (images_folder, masks_folder):
        if not folder.is_dir():
            raise TrainingError(f"{folder}: no such folder; expected images and masks side by side")
    for file in map(Path, filter(is_image, files_under(images_folder))):
        base = masks_folder / file.relative_to(images_folder).with_suffix("")
        mask = base if base.is_dir() else base.with_name(f"{base.name}.png")
        if not mask.exists():
            found.add(str(file), f"its mask {mask} is missing")
            continue
        try:
            width, height = open_size(file)
        except Exception as error:
            found.add(str(file), unreadable(error))
        else:
            yield file, mask, height, width


def open_size(file: Path) -> tuple[int, int]:
    """Returns the width and height of an image file from its header."""
    with Image.open(file) as image:
        return image.size


def read_instances(
    images_folder: Path,
    masks_folder: Path,
    problems: Problems,
    *,
    classes: Sequence[str] | None = None,
    keep_empty: bool = False,
) -> AnnotatedImages:
    """Reads images with one PNG for each object, or one PNG with the numbers of all objects of an image.

    Args:
        images_folder: the folder of the images.
        masks_folder: the folder of the masks.
        problems: collects what cannot be used.
        classes: the class names of the training images, for another split; if None, the names of the class folders.
        keep_empty: see `with_objects`.
    """
    found = AnnotationProblems(problems)
    pairs = list(_pairs(images_folder, masks_folder, found))
    names = [_class_of(mask, file) for _, mask, _, _ in pairs for file in _mask_files(mask)]
    known = list(classes) if classes is not None else sorted(set(names))
    images: list[AnnotatedImage] = []
    for picture, mask, height, width in pairs:
        image = AnnotatedImage(str(picture), picture, len(images), height, width)
        for file in _mask_files(mask):
            try:
                image.objects.extend(_objects(mask, file, image, known))
            except AnnotationError as error:
                found.add(str(file), str(error), image.name)
        images.append(image)
    usable = images_with_objects(images, found, keep_empty=keep_empty)
    found.report()
    if not usable:
        raise TrainingError(f"{images_folder} has no image that can be used")
    return AnnotatedImages(usable, known)


def _mask_files(mask: Path) -> list[Path]:
    """Returns the mask files of an image."""
    return [Path(file) for file in files_under(mask) if is_image(file)] if mask.is_dir() else [mask]


def _class_of(mask: Path, file: Path) -> str:
    return OBJECT if file.parent in (mask, mask.parent) else file.parent.name


def _objects(mask: Path, file: Path, image: AnnotatedImage, classes: Sequence[str]) -> list[AnnotatedObject]:
    """Returns the objects in one mask file."""
    name = _class_of(mask, file)
    if name not in classes:
        raise AnnotationError(f"its class {name!r} is not among the classes {', '.join(classes)}")
    numbers = read_numbers(file)
    if numbers.shape != (image.height, image.width):
        raise AnnotationError(
            f"it has {numbers.shape[1]} x {numbers.shape[0]} pixels, but its image {image.file} has {image.width} x "
            f"{image.height}"
        )
    if mask.is_dir():
        numbers = numbers != 0
        if not numbers.any():
            raise AnnotationError("its mask has no area")
    objects = []
    numbers = numbers.astype(np.int64)
    if numbers.min() < 0:
        raise AnnotationError(f"it has the number {numbers.min()}, expected 0 for the background and 1, 2, ...")
    values, numbers = np.unique(numbers, return_inverse=True)  # compact, because numbers may be large
    numbers = numbers.reshape(image.height, image.width) + (values[0] != 0)
    areas = np.bincount(numbers.ravel())
    for index, place in enumerate(ndimage.find_objects(numbers), start=1):
        rows, columns = place
        value = int(values[index - (values[0] != 0)])
        box = float(columns.start), float(rows.start), float(columns.stop), float(rows.stop)
        stored = MaskFile(file) if mask.is_dir() else MaskFile(file, value)
        numbered = str(file) if mask.is_dir() else f"{file} object {value}"
        objects.append(AnnotatedObject(numbered, classes.index(name), box, float(areas[index]), stored))
    return objects


class LabelMaps(Images):
    """Images with a class for each pixel.

    Args:
        images_folder: the folder of the images.
        masks_folder: the folder of the label maps.
        classes: class names, by label.
        problems: collects what cannot be used. Sizes are checked at once; labels when a label map is read.
        ignore: the numbers of pixels that are not counted, such as those of void.
    """

    def __init__(
        self,
        images_folder: Path,
        masks_folder: Path,
        classes: Sequence[str],
        problems: Problems,
        *,
        ignore: Sequence[int] = (IGNORED,),
    ) -> None:
        if not 0 < len(classes) <= IGNORED:
            raise TrainingError(f"label maps have 1 to {IGNORED} classes, got {len(classes)}")
        found = AnnotationProblems(problems)
        self.files: list[tuple[Path, Path]] = []
        sizes = []
        for picture, mask, height, width in _pairs(images_folder, masks_folder, found):
            try:
                size = open_size(mask)
            except Exception as error:
                found.add(str(mask), unreadable(error))
                continue
            if size != (width, height):
                reason = f"it has {size[0]} x {size[1]} pixels, but its image {picture} has {width} x {height}"
                found.add(str(mask), reason)
                continue
            self.files.append((picture, mask))
            sizes.append(width / height)
        found.report()
        if not self.files:
            raise TrainingError(f"{images_folder} has no image that can be used")
        super().__init__(np.zeros(len(self.files), dtype=np.int64), classes)
        self.ratios = torch.tensor(sizes)
        self.label_of = np.full(2**16, -1, dtype=np.int64)  # the label of each number of a pixel
        self.label_of[: len(classes)] = np.arange(len(classes))
        self.label_of[list(ignore)] = IGNORED

    @property
    def aspect_ratios(self) -> torch.Tensor:
        return self.ratios

    def name(self, index: int) -> str:
        return str(self.files[index][0])

    def open(self, index: int) -> Image.Image:
        return open_rgb(self.files[index][0])

    def target(self, index: int) -> tv_tensors.Mask:
        """Returns the label map, int64 [H, W], in which pixels that are not counted are `IGNORED`.

        Raises:
            AnnotationError: if it has an unknown class, or if no pixel has a class.
        """
        mask = self.files[index][1]
        numbers = read_numbers(mask).astype(np.int64)
        outside = numbers[(numbers < 0) | (numbers >= len(self.label_of))]
        labels = self.label_of[numbers] if not outside.size else outside
        unknown = numbers[labels < 0] if not outside.size else outside
        if unknown.size:
            raise AnnotationError(
                f"{unknown.size:,} pixels of its mask {mask} have the unknown class {unknown[0]}: expected 0 to "
                f"{len(self.classes) - 1}, or a number in data_options.ignore"
            )
        if (labels == IGNORED).all():
            raise AnnotationError(f"no pixel of its mask {mask} has a class")
        return tv_tensors.Mask(torch.from_numpy(labels))
