"""CIFAR-10 and CIFAR-100, read from the files of the Python version."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..files import TrainingError
from .images import ArrayImages


@dataclass(frozen=True)
class _Layout:
    """The file names of one dataset, and the keys in the files."""

    folder: str
    labels: str
    train_files: tuple[str, ...]
    test_file: str
    meta_file: str
    class_names: str


LAYOUTS = (
    _Layout(
        "cifar-10-batches-py", "labels", tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta",
        "label_names",
    ),
    _Layout("cifar-100-python", "fine_labels", ("train",), "test", "meta", "fine_label_names"),
)  # fmt: skip


def find_cifar(path: Path) -> tuple[Path, _Layout] | None:
    """Returns where CIFAR-10 or CIFAR-100 is in a folder, and its layout; None if the folder holds neither."""
    for layout in LAYOUTS:
        root = path if path.name == layout.folder else path / layout.folder
        if root.is_dir():
            return root, layout
    return None


def read_cifar(path: Path) -> tuple[ArrayImages, ArrayImages] | None:
    """Returns the training and test images in a folder, or None if it holds neither CIFAR-10 nor CIFAR-100."""
    found = find_cifar(path)
    if found is None:
        return None
    root, layout = found
    classes = list(_unpickle(root / layout.meta_file)[layout.class_names])
    train = _read(root, layout.train_files, layout.labels, classes)
    return train, _read(root, (layout.test_file,), layout.labels, classes)


def _read(root: Path, files: tuple[str, ...], labels_key: str, classes: list[str]) -> ArrayImages:
    contents = [_unpickle(root / name) for name in files]
    pixels = np.concatenate([np.asarray(content["data"], np.uint8) for content in contents])
    pixels = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    labels = np.concatenate([np.asarray(content[labels_key], np.int64) for content in contents])
    if len(labels) != len(pixels):
        raise TrainingError(f"{root} holds {len(pixels)} images and {len(labels)} labels: it is damaged")
    return ArrayImages(np.ascontiguousarray(pixels), labels, classes, f"{root}/{files[0]}")


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles NumPy arrays only, because pickles from other sources could execute code."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not part of CIFAR")


def _unpickle(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            return _PlainUnpickler(file, encoding="latin1").load()
    except (OSError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
        raise TrainingError(f"{path} cannot be read as a part of CIFAR: {error}; download it again") from error
