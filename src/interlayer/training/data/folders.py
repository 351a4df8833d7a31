"""Images in class folders: ROOT/CLASS/IMAGE."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from ...models.weights import first_names
from ..files import TrainingError
from .images import Images, Problems, open_rgb
from .splits import files_under, folders_in, is_image, is_litter

shortened = partial(first_names, most=5)


class FolderImages(Images):
    """A folder of class folders, each with images at any depth.

    Args:
        root: the folder.
        classes: the class names of the training images, for images of another split; if None, the sorted names of the
            class folders.
        problems: collects files that are not images, empty class folders, and folders of other classes.
        labels: the label of each class folder by name, if the folders are not named exactly as the classes.
    """

    def __init__(
        self,
        root: Path,
        classes: Sequence[str] | None,
        problems: Problems,
        *,
        labels: Mapping[str, int] | None = None,
    ) -> None:
        self.root = root
        found = class_folders(root)
        classes = list(classes) if classes is not None else found
        labels = labels if labels is not None else {name: label for label, name in enumerate(classes)}
        loose = sorted(entry.path for entry in os.scandir(root) if is_image(entry.name) and not is_litter(entry.name))
        unusable = dict.fromkeys(loose, "it lies outside the class folders")
        unusable |= _other_classes(root, found, classes, labels)
        self.files: list[str] = []
        targets = []
        for name in found:
            if name not in labels:
                continue
            before = len(self.files)
            for path in files_under(root / name):
                if is_image(path):
                    self.files.append(path)
                    targets.append(labels[name])
                else:
                    unusable[path] = f"it is no image (images end in {', '.join(IMG_EXTENSIONS)})"
            if len(self.files) == before:
                unusable[str(root / name)] = "the class folder holds no images"
        super().__init__(np.array(targets, dtype=np.int64), classes)
        problems.add(unusable)
        if not self.files:
            raise TrainingError(f"{root} holds no images")

    def name(self, index: int) -> str:
        return self.files[index]

    def open(self, index: int) -> Image.Image:
        return open_rgb(self.files[index])


def class_folders(root: Path) -> list[str]:
    """Returns the names of the class folders in a folder, sorted."""
    found = [folder.name for folder in folders_in(root)]
    if not found:
        raise TrainingError(f"{root} holds no class folders: expected {root}/CLASS/IMAGE")
    return found


def _other_classes(
    root: Path, found: Sequence[str], classes: Sequence[str], labels: Mapping[str, int]
) -> dict[str, str]:
    """Returns why the folders of other classes cannot be used, by path."""
    others = [name for name in found if name not in labels]
    if not others:
        return {}
    present = {labels[name] for name in found if name in labels}
    lacking = [name for label, name in enumerate(classes) if label not in present]
    if not present:
        raise TrainingError(
            f"{root} has other classes than training: {shortened(found)} instead of {shortened(classes)}"
        )
    reason = f"is not among the {len(classes)} classes of training"
    if len(others) > 1:
        reason += f", and neither are {shortened(others[1:])}"
    if lacking:
        reason += f"; {root.name} lacks {shortened(lacking)}"
    return {str(root / name): f"its class {name!r} {reason}" for name in others}
