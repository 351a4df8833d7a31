"""ImageNet's validation images with several right labels for each: ImageNet-ReaL.

Beyer et al., "Are we done with ImageNet?" (2020), collected the labels again. Their file is a JSON list of 50,000
lists: the right labels of ILSVRC2012_val_00000001.JPEG first, then those of the next image. An image without a right
label has an empty list and is left out. timm contains the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import numpy as np
from PIL import Image

from ..files import TrainingError
from ..recipe import Recipe
from ..wording import listing
from .class_names import IMAGENET_1K, ClassNames
from .dataset import Data
from .folders import shortened
from .image_folders import chosen_splits
from .images import Images, Problems, open_rgb
from .splits import files_under, find_splits, folders_in, is_image, split_of

REAL = "real"
VALIDATION_IMAGES = 50_000
NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")
PADDING = -1
NOT_NUMBERED = "its name has no number of a validation image: expected ILSVRC2012_val_00000001.JPEG to ..._00050000"


class RelabeledImages(Images):
    """Image files with several right labels each.

    Args:
        files: the image files.
        right: the right labels of each file, at least one.
        classes: class names, by label.
    """

    def __init__(self, files: Sequence[str], right: Sequence[Sequence[int]], classes: Sequence[str]) -> None:
        super().__init__(np.array([labels[0] for labels in right], dtype=np.int64), classes)
        self.files, self.right = list(files), right
        self.most = max(map(len, right), default=0)

    def name(self, index: int) -> str:
        return self.files[index]

    def open(self, index: int) -> Image.Image:
        return open_rgb(self.files[index])

    def target(self, index: int) -> list[int]:
        """Returns the right labels, padded with -1 to the largest number of labels of an image."""
        labels = list(self.right[index])
        return labels + [PADDING] * (self.most - len(labels))


def open_relabeled_folder(
    path: Path, recipe: Recipe, classes: ClassNames, split: str | None, problems: Problems, *, labels: str
) -> Data:
    """Opens a folder of ImageNet's validation images with the labels of a file. It needs no class folders.

    Args:
        path: the folder of the images, or the folder that holds it beside other splits.
        recipe: gives the names of the splits, if `data_options` has them.
        classes: the classes of the network, which must be those of ImageNet-1k.
        split: the split among the folders in ``path``; the validation split if None.
        problems: collects images whose names have no number of a validation image.
        labels: the JSON file of the labels, or "real" for ImageNet-ReaL.
    """
    if not path.is_dir():
        raise TrainingError(f"labels={labels} needs a folder of ImageNet's validation images, got {path}")
    if not classes.is_imagenet_1k:
        raise TrainingError(f"labels={labels} are classes of ImageNet-1k, and the network has other classes")
    right = read_right_labels(labels)
    path, notes = _folder_of_images(path, split or "validation", chosen_splits(recipe), required=split is not None)
    files = [file for file in files_under(path) if is_image(file)]
    if not files:
        raise TrainingError(f"{path} holds no images")
    numbers = {file: _number(file) for file in files}
    problems.add({file: NOT_NUMBERED for file, number in numbers.items() if number is None})
    labeled = {file: right[number - 1] for file, number in numbers.items() if number is not None}
    used = {file: found for file, found in labeled.items() if found}
    if not used:
        raise TrainingError(f"none of the {len(files):,} images of {path} has a right label in {labels}")
    of = "ImageNet-ReaL" if labels == REAL else labels
    notes.append(f"{len(used):,} images have right labels in {of}, and any of them counts")
    if len(used) < len(labeled):
        notes.append(f"{len(labeled) - len(used):,} of {len(labeled):,} images have no right label and are left out")
    images = RelabeledImages(list(used), list(used.values()), classes.names)
    return Data(images, None, images, list(classes.names), problems, notes)


def _folder_of_images(path: Path, split: str, chosen: Mapping[str, str], *, required: bool) -> tuple[Path, list[str]]:
    """Returns the folder of a split if there is one in ``path``, and otherwise ``path``, with a note that names it.

    Args:
        path: the folder.
        split: the split.
        chosen: the names of the folders by split, if they are given instead of being found.
        required: whether to raise an error if there is no such split.
    """
    inside = folders_in(path)
    found = [folder for folder in inside if split_of(folder.name) == split]
    if split in chosen:
        found = [find_splits(path, {split: chosen[split]})[split]]
    if len(found) > 1:
        raise TrainingError(f"{path} holds {listing([f'{folder.name}/' for folder in found])}: give one as --data")
    if required and not found:
        held = shortened([folder.name for folder in inside]) or "no folders"
        raise TrainingError(f"{path} has no {split} split: it holds {held}")
    return (found[0], [f"evaluating {found[0]}"]) if found else (path, [])


def _number(file: str) -> int | None:
    """Returns the number of a validation image from 1 to 50,000, or None if its file name has none."""
    found = NUMBER.search(Path(file).name)
    return int(found[1]) if found and 1 <= int(found[1]) <= VALIDATION_IMAGES else None


def read_right_labels(name: str) -> list[list[int]]:
    """Reads the right labels of ImageNet's 50,000 validation images.

    Args:
        name: a JSON file, or "real" for ImageNet-ReaL as timm contains it.
    """
    if name == REAL:
        text = resources.files("timm.data").joinpath("_info", "imagenet_real_labels.json").read_bytes()
    elif Path(name).expanduser().is_file():
        text = Path(name).expanduser().read_bytes()
    else:
        raise TrainingError(f"{name}: no such file of labels; labels=real are those of ImageNet-ReaL")
    try:
        right = json.loads(text)
    except ValueError as error:  # neither text nor JSON
        raise TrainingError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(right, list) or len(right) != VALIDATION_IMAGES:
        found = f"{len(right):,} entries" if isinstance(right, list) else type(right).__name__
        raise TrainingError(f"{name} must be a list of 50,000 lists, one for each validation image, got {found}")
    for number, labels in enumerate(right, 1):
        if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < IMAGENET_1K for label in labels):
            raise TrainingError(f"entry {number} of {name} must be a list of classes from 0 to 999, got {labels!r}")
    return [list(dict.fromkeys(labels)) for labels in right]  # the probability of a label is counted once
