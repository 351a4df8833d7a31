"""Images in class folders: ROOT/CLASS/IMAGE."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from ..files import TrainingError
from .images import Images, Problems, open_rgb


class FolderImages(Images):
    """A folder of class folders, each with images at any depth.

    Args:
        root: the folder.
        classes: the class names of the training images, for images of another split; if None, the sorted names of the
            class folders.
        problems: collects files that are not images and empty class folders.
    """

    def __init__(self, root: Path, classes: Sequence[str] | None, problems: Problems) -> None:
        self.root = root
        found = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
        if not found:
            raise TrainingError(f"{root} holds no class folders: expected {root}/CLASS/IMAGE")
        classes = list(classes) if classes is not None else found
        loose = sorted(entry.path for entry in os.scandir(root) if entry.name.lower().endswith(IMG_EXTENSIONS))
        unusable = dict.fromkeys(loose, "it lies outside the class folders")
        self.files: list[str] = []
        labels = []
        index = {name: i for i, name in enumerate(classes)}
        for name in found:
            if name not in index:
                unusable[str(root / name)] = f"its class {name!r} is not among the {len(index)} classes of training"
                continue
            before = len(self.files)
            for path in _files_under(root / name):
                if path.lower().endswith(IMG_EXTENSIONS):
                    self.files.append(path)
                    labels.append(index[name])
                else:
                    unusable[path] = f"it is no image (images end in {', '.join(IMG_EXTENSIONS)})"
            if len(self.files) == before:
                unusable[str(root / name)] = "the class folder holds no images"
        super().__init__(np.array(labels, dtype=np.int64), classes)
        problems.add(unusable)
        if not self.files:
            raise TrainingError(f"{root} holds no images")

    def name(self, index: int) -> str:
        return self.files[index]

    def open(self, index: int) -> Image.Image:
        return open_rgb(self.files[index])


def _files_under(folder: Path) -> Iterator[str]:
    for path, folders, files in os.walk(folder, followlinks=True):
        folders.sort()
        yield from (os.path.join(path, name) for name in sorted(files) if not name.startswith("."))
