"""The splits of a folder of images as sources: for training, and for the evaluation of a network."""

from __future__ import annotations

from pathlib import Path

from ..files import TrainingError
from ..recipe import Recipe
from ..wording import listing
from .class_names import ClassNames
from .dataset import Data, cut
from .folders import FolderImages, class_folders, shortened
from .images import Problems, Subset
from .splits import SPLITS, find_splits, folders_in, is_image, split_of

EVALUATED = ("test", "validation", "train")  # the split that is evaluated: the first one that exists


def open_folder(path: Path, recipe: Recipe, problems: Problems) -> Data:
    """Opens a folder of images for training.

    If it has a validation and a test split, they are used as such. If it has one of them, it is the test split. If it
    has neither, a tenth of the training images is held out as the test split.
    """
    splits = _splits(path, recipe)
    if not splits:
        return _hold_test_out(FolderImages(path, None, problems), problems, f"{path} has no train folder")
    if "train" not in splits:
        listed = listing([f"{folder.name}/ with {len(folders_in(folder))} classes" for folder in splits.values()])
        raise TrainingError(
            f"{path} holds {listed}, but no training images: expected {path}/train/CLASS/IMAGE; to train on "
            f"{next(iter(splits.values())).name}/ and hold a tenth of it out, give it as --data"
        )
    train = FolderImages(splits["train"], None, problems)
    classes = list(train.classes)
    held_out = {split: FolderImages(folder, classes, problems) for split, folder in splits.items() if split != "train"}
    if not held_out:
        return _hold_test_out(train, problems, f"{path} has neither a test nor a val folder")
    notes = [note for split in held_out for note in _missing_classes(splits[split], classes)]
    test = held_out.get("test") or held_out["validation"]
    validation = held_out.get("validation") if "test" in held_out else None
    return Data(train, validation, test, classes, problems, [*_nested_classes(splits["train"]), *notes])


def open_folder_to_evaluate(
    path: Path, recipe: Recipe, classes: ClassNames, split: str | None, problems: Problems
) -> Data:
    """Opens the images of a folder on which a network is evaluated. Class folders are matched with its classes.

    Args:
        classes: the classes of the network; empty if they are those of the folder.
        split: train, validation or test; if None, the test split, or else the validation split, or else the training
            split. Of a folder without splits, all images are evaluated.
    """
    splits, notes = _splits(path, recipe), []
    if split and split not in splits:
        raise TrainingError(f"{path} has no {split} split: it holds {shortened([f.name for f in folders_in(path)])}")
    if splits:
        split = split or next(name for name in EVALUATED if name in splits)
        path = splits[split]
        notes.append(f"evaluating {path}, the {split} split")
    found = class_folders(path)
    labels = classes.match(found) if len(classes) else {name: label for label, name in enumerate(found)}
    images = FolderImages(path, classes.names or found, problems, labels=labels)
    present = sorted(set(labels.values()))
    if classes.is_imagenet_1k and all(name.isdecimal() for name in labels):
        notes.append(f"the class folders of {path} are the numbers of ImageNet's classes")
    if len(present) < len(classes):
        notes.append(f"{len(present):,} of the {len(classes):,} classes have a folder in {path}")
    return Data(images, None, images, list(images.classes), problems, notes, labels=present if len(classes) else None)


def _splits(path: Path, recipe: Recipe) -> dict[str, Path]:
    """Returns the folder of each split, found by name or given by the recipe."""
    if not path.is_dir():
        raise TrainingError(f"{path} is a file, expected a folder of images")
    return find_splits(path, chosen_splits(recipe))


def chosen_splits(recipe: Recipe) -> dict[str, str]:
    """Returns the names of the folders by split that the recipe gives in `data_options`."""
    keys = {f"{split}_split": split for split in SPLITS}
    for key in recipe.data_options:
        if key not in keys:
            raise TrainingError(f"a folder of images has no option {key!r}: {', '.join(keys)}")
    return {keys[key]: str(name) for key, name in recipe.data_options.items()}


def _hold_test_out(images: FolderImages, problems: Problems, why: str) -> Data:
    """Holds a tenth of the images out as the test split."""
    if len(images) < 10:
        raise TrainingError(
            f"{images.root} has {len(images)} images and no test folder: too few to hold a tenth out for testing"
        )
    rest, test = cut(len(images), len(images) // 10)
    note = f"{why}: a tenth of its {len(images):,} images, the same for every seed, is the test split"
    notes = [*_nested_classes(images.root), note]
    return Data(Subset(images, rest), None, Subset(images, test), list(images.classes), problems, notes)


def check_class_count(root: str, classes: list[str]) -> None:
    """Raises if there is only one class. The error names the folder that may have been meant."""
    if len(classes) > 1:
        return
    inside = Path(root).expanduser() / classes[0] if classes else Path(root)
    count = len(folders_in(inside)) if inside.is_dir() else 0
    meant = f"; if the {count} folders in {inside} are the classes, give it as --data" if count > 1 else ""
    raise TrainingError(f"{root} has only one class, {shortened(classes)}: a classifier needs at least two{meant}")


def _missing_classes(folder: Path, classes: list[str]) -> list[str]:
    lacking = sorted(set(classes) - set(class_folders(folder)))
    return [f"{folder} lacks {len(lacking)} of the {len(classes)} classes: {shortened(lacking)}"] if lacking else []


def _nested_classes(root: Path) -> list[str]:
    """Returns a note about the class folders that hold folders and no images of their own."""
    nested = [
        folder
        for folder in folders_in(root)
        if len(folders_in(folder)) > 1 and not any(is_image(entry.name) for entry in folder.iterdir())
    ]
    if not nested:
        return []
    inside = shortened([folder.name for folder in folders_in(nested[0])])
    return [f"{len(nested)} class folders of {root} hold only folders: {nested[0].name} ({inside}) is one class"]


def named_split(name: str) -> str:
    """Returns the split that a user names: train, validation or test, or one of their usual folder names."""
    split = split_of(name)
    if split is None:
        raise TrainingError(f"unknown split {name!r}: expected train, validation or test")
    return split
