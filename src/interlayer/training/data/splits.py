"""Finds the splits of a folder of images by their names: train or training, val, valid, validation or dev, and test.

These names are also understood in any case and with a usual ending: Train, training_set, test-images, train2017.

    FOLDER/CLASS/IMAGE                 class folders without splits
    FOLDER/SPLIT/CLASS/IMAGE           splits
    FOLDER/images/SPLIT/CLASS/IMAGE    splits in a folder `images`, or in the only folder

A folder is a split only if it holds folders, because `train` can also be the name of a class. Other trees are refused,
and the error says what was seen: two folders for one split, splits beside class folders, splits without class folders,
folders such as `pets_train` and `pets_test`, which seem to be splits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from ..files import TrainingError
from ..wording import listing

SPLITS = {
    "train": ("train", "training", "trn"),
    "validation": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing", "tst"),
}
_SPLIT_OF_NAME = {name: split for split, names in SPLITS.items() for name in names}
_ENDINGS = {"set", "split", "data", "dataset", "images", "imgs"}  # words that may follow the name of a split
_LITTER = {"__macosx", "@eadir", "lost+found", "$recycle.bin", "system volume information", "thumbs.db", "desktop.ini"}
REMEDY = "name the folders, for example data_options.train_split=train data_options.test_split=val"


def split_of(name: str) -> str | None:
    """Returns the split that a folder name stands for: train, validation or test; None if it names no split."""
    first, *rest = _words(name) or [""]
    endings = all(word in _ENDINGS or word.isdigit() for word in rest)
    return _SPLIT_OF_NAME.get(first) or _SPLIT_OF_NAME.get(first.removesuffix("set")) if endings else None


def _words(name: str) -> list[str]:
    """Returns the words and numbers of a folder name: `train` and `2017` of Train2017."""
    return re.findall(r"\d+|[^\W\d_]+", name.casefold())


def is_litter(name: str) -> bool:
    """Whether operating systems and editors create files or folders of this name. Hidden names are among them."""
    return name.startswith(".") or name.casefold() in _LITTER


def folders_in(folder: Path) -> list[Path]:
    """Returns the folders in a folder, sorted by name."""
    return sorted(Path(entry.path) for entry in os.scandir(folder) if entry.is_dir() and not is_litter(entry.name))


def files_under(folder: Path) -> Iterator[str]:
    """Yields the paths of the files in a folder and its subfolders, sorted by name."""
    for path, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not is_litter(name))
        yield from (os.path.join(path, name) for name in sorted(files) if not is_litter(name))


def is_image(path: str) -> bool:
    """Whether a file has the suffix of an image."""
    return path.lower().endswith(IMG_EXTENSIONS)


def find_splits(root: Path, chosen: Mapping[str, str] | None = None) -> dict[str, Path]:
    """Returns the folder of each split in a folder of images; empty if it holds class folders without splits.

    Args:
        root: the folder.
        chosen: the names of the folders by split, if they are given instead of being found.

    Raises:
        TrainingError: if it is not clear which folders are splits.
    """
    if chosen:
        return {split: _chosen(root, split, str(name)) for split, name in chosen.items()}
    folders = folders_in(root)
    named = [folder for folder in folders if split_of(folder.name)]
    others = [folder for folder in folders if not split_of(folder.name)]
    if not named:
        return _splits_inside(root, folders)
    splits = [folder for folder in named if folders_in(folder)]
    if not splits:
        roles = {split_of(folder.name) for folder in named}
        if len(roles) > 1 or not any(map(_holds_images, others)):
            raise TrainingError(f"{root} holds {_names(named)} without class folders: expected {named[0]}/CLASS/IMAGE")
        return {}  # a class of this name
    _check_splits(root, splits, [folder for folder in named if folder not in splits], others)
    return {split_of(folder.name) or "": folder for folder in splits}


def _check_splits(root: Path, splits: list[Path], without_classes: list[Path], others: list[Path]) -> None:
    classes = [folder for folder in others if _holds_images(folder)]
    if classes:
        raise TrainingError(
            f"{root} holds {_names(splits)} and also images in {_names(classes)}: move what is neither a split nor a "
            f"class out of it, or {REMEDY}"
        )
    if without_classes:
        raise TrainingError(
            f"{root} holds {_names(splits)} with class folders, but {_names(without_classes)} without: expected "
            f"{without_classes[0]}/CLASS/IMAGE; or {REMEDY}"
        )
    for split in SPLITS:
        same = [folder for folder in splits if split_of(folder.name) == split]
        if len(same) > 1:
            raise TrainingError(f"{root} holds {_names(same)}, which both name the {split} split: {REMEDY}")


def _splits_inside(root: Path, folders: list[Path]) -> dict[str, Path]:
    """Looks for splits one level below a folder that has none of its own."""
    inside = [folder for folder in folders if any(split_of(f.name) and folders_in(f) for f in folders_in(folder))]
    if inside and (len(folders) == 1 or (len(inside) == 1 and inside[0].name.casefold() == "images")):
        return find_splits(inside[0])
    nested = [folder for folder in folders if {split_of(f.name) for f in folders_in(folder)} - {None}]
    if nested and len(nested) == len(folders):
        found = ", ".join(f"{nested[0].name}/{f.name}" for f in folders_in(nested[0]))
        raise TrainingError(
            f"{root} holds splits inside its folders ({found}): expected {root}/train/CLASS/IMAGE, or give one of its "
            f"folders as --data"
        )
    _check_classes(root, folders)
    return {}


def _check_classes(root: Path, folders: list[Path]) -> None:
    """Raises if all class folders seem to be splits: their names have the word for one, and they hold folders."""
    if len(folders) > 1 and all(
        _SPLIT_OF_NAME.keys() & _words(folder.name) and folders_in(folder) for folder in folders
    ):
        raise TrainingError(
            f"{root} holds {_names(folders)}, which seem to be splits: rename them to train/ and test/, or {REMEDY}"
        )


def _chosen(root: Path, split: str, name: str) -> Path:
    folder = root / name
    if not folder.is_dir():
        found = _names(folders_in(root)) or "no folders"
        raise TrainingError(f"data_options.{split}_split={name}: {root} has no such folder, it holds {found}")
    return folder


def _holds_images(folder: Path) -> bool:
    return any(map(is_image, files_under(folder)))


def _names(folders: Sequence[Path], most: int = 5) -> str:
    names = [f"{folder.name}/" for folder in folders]
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more folders"
    return listing(names)
