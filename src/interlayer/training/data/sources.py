"""Image sources: scikit-learn's digits, CIFAR, folders, Hugging Face datasets, WebDataset shards and TFDS.

A source is either map-style (`Images`: any image can be read by its index) or a stream (`Stream`: shards are read
sequentially). `open_data` opens the training, validation and test split of the data that a recipe names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ..files import TrainingError
from ..recipe import Recipe
from .cifar import read_cifar
from .folders import FolderImages
from .hugging_face import HuggingFaceImages
from .images import ArrayImages, Images, Problems, Subset
from .streams import Stream


@dataclass
class Data:
    """The three splits of a dataset.

    Args:
        train: the training images.
        validation: held-out images that choose the best epoch; None if the test images are evaluated after every epoch.
        test: the test images.
        classes: class names, by label.
        problems: images that cannot be used.
        notes: messages to the user about how the data was split.
    """

    train: Images | Stream
    validation: Images | Stream | None
    test: Images | Stream
    classes: list[str]
    problems: Problems
    notes: list[str] = field(default_factory=list)


def open_data(recipe: Recipe) -> Data:
    """Opens the three splits of the data that a recipe names."""
    problems = Problems(recipe.on_bad_image)
    name, data = recipe.data, None
    kind = name.split("/", 1)[0]
    if name == "digits":
        data = _digits(problems)
    elif name == "synthetic":
        data = _synthetic(recipe, problems)
    elif kind in ("wds", "tfds", "hfids"):
        data = _stream(recipe, problems)
    elif kind == "hfds":
        data = _hugging_face(recipe, problems)
    else:
        path = Path(name).expanduser()
        if not path.exists():
            raise TrainingError(
                f"{name}: no such folder; --data takes a folder of images, a folder with CIFAR, digits, synthetic, "
                f"hfds/NAME, wds/FOLDER or tfds/NAME"
            )
        data = _cifar(path, problems) or _folders(path, problems)
    if isinstance(data.train, Images) and isinstance(data.test, Images):
        _check_labels(data, recipe)
        _hold_out(data, recipe)
    elif recipe.validation:
        raise TrainingError(f"validation={recipe.validation:g} cannot be held out of a stream: name a validation_split")
    return data


def _check_labels(data: Data, recipe: Recipe) -> None:
    """Records and removes images whose label is not a class index."""
    count = recipe.num_classes or len(data.classes)
    if recipe.num_classes:
        data.classes = [*data.classes[:count], *(str(i) for i in range(len(data.classes), count))]
    for split in ("train", "validation", "test"):
        images = getattr(data, split)
        if images is None:
            continue
        outside = np.flatnonzero((images.labels < 0) | (images.labels >= count))
        if len(outside):
            reason = "its label {} is outside 0 to " + f"{count - 1}, the {count} classes"
            data.problems.add({images.name(int(i)): reason.format(images.labels[i]) for i in outside})
            setattr(data, split, Subset(images, np.setdiff1d(np.arange(len(images)), outside)))


def _hold_out(data: Data, recipe: Recipe) -> None:
    """Holds validation images out of the training images. They are the same for every seed."""
    if not recipe.validation:
        return
    assert isinstance(data.train, Images)
    if data.validation is not None:
        data.notes.append(
            f"{recipe.data} has validation images: validation={recipe.validation:g} is not held out of training"
        )
        return
    total = len(data.train)
    count = round(recipe.validation if recipe.validation >= 1 else recipe.validation * total)
    if not 0 < count < total:
        raise TrainingError(f"validation={recipe.validation:g} of {total} training images leaves a part empty")
    train, held_out = _cut(total, count)
    data.train, data.validation = Subset(data.train, train), Subset(data.train, held_out)


def _cut(total: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits ``range(total)`` at random into ``total - count`` and ``count`` indices, equally for every seed."""
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0)).numpy()
    return np.sort(order[count:]), np.sort(order[:count])


def _digits(problems: Problems) -> Data:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.repeat((digits.images * (255 / 16)).astype(np.uint8)[..., None], 3, axis=-1)
    images = ArrayImages(pixels, digits.target, [str(name) for name in digits.target_names], "digits")
    train, test = _cut(len(images), 360)
    return Data(Subset(images, train), None, Subset(images, test), list(images.classes), problems)


def _synthetic(recipe: Recipe, problems: Problems) -> Data:
    """Returns random images of any size, for benchmarks."""
    options = {"images": 2048, "test_images": 256, "classes": 1000, "size": recipe.image_size or 224}
    for key in recipe.data_options:
        if key not in options:
            raise TrainingError(f"synthetic data has no option {key!r}: {', '.join(options)}")
    options |= recipe.data_options
    generator = np.random.default_rng(0)
    count, size = int(options["images"]), int(options["size"])
    pixels = generator.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    labels = generator.integers(0, int(options["classes"]), count)
    images = ArrayImages(pixels, labels, [str(i) for i in range(int(options["classes"]))], "synthetic")
    test = Subset(images, np.arange(min(count, int(options["test_images"]))))
    return Data(images, None, test, list(images.classes), problems)


def _cifar(path: Path, problems: Problems) -> Data | None:
    found = read_cifar(path)
    if found is None:
        return None
    train, test = found
    return Data(train, None, test, list(train.classes), problems)


def _folders(path: Path, problems: Problems) -> Data:
    if not path.is_dir():
        raise TrainingError(f"{path} is a file, expected a folder of images")
    train = path / "train"
    if not train.is_dir():
        images = FolderImages(path, None, problems)
        if len(images) < 10:
            raise TrainingError(
                f"{path} has {len(images)} images and no test folder: too few to hold a tenth out for testing"
            )
        rest, test = _cut(len(images), len(images) // 10)
        note = f"{path} has no train folder: a tenth of its {len(images)} images, the same for every seed, is the test"
        return Data(Subset(images, rest), None, Subset(images, test), list(images.classes), problems, [note])
    images = FolderImages(train, None, problems)
    classes = list(images.classes)
    splits = {
        name: next((FolderImages(path / f, classes, problems) for f in folders if (path / f).is_dir()), None)
        for name, folders in (("validation", ("val", "validation", "valid")), ("test", ("test",)))
    }
    if splits["test"] is None and splits["validation"] is None:
        rest, held_out = _cut(len(images), max(1, len(images) // 10))
        note = f"{path} has neither a test nor a val folder: a tenth of train, the same for every seed, is the test"
        return Data(Subset(images, rest), None, Subset(images, held_out), classes, problems, [note])
    if splits["test"] is None:
        assert splits["validation"] is not None
        return Data(images, None, splits["validation"], classes, problems)
    return Data(images, splits["validation"], splits["test"], classes, problems)


def _hugging_face(recipe: Recipe, problems: Problems) -> Data:
    name = recipe.data.split("/", 1)[1]
    options = dict(recipe.data_options)
    splits = {split: options.pop(f"{split}_split", None) for split in ("train", "validation", "test")}
    images = HuggingFaceImages(name, splits["train"] or "train", options)
    test = HuggingFaceImages(name, splits["test"] or "test", options)
    validation = HuggingFaceImages(name, splits["validation"], options) if splits["validation"] else None
    return Data(images, validation, test, list(images.classes), problems)


def _stream(recipe: Recipe, problems: Problems) -> Data:
    kind, _, rest = recipe.data.partition("/")
    options = recipe.data_options
    root = rest if kind == "wds" else str(options.get("root", ""))
    train = Stream(recipe.data, root, str(options.get("train_split", "train")), training=True, recipe=recipe)
    test = Stream(recipe.data, root, str(options.get("test_split", "validation")), training=False, recipe=recipe)
    validation = None
    if "validation_split" in options:
        validation = Stream(recipe.data, root, str(options["validation_split"]), training=False, recipe=recipe)
    return Data(train, validation, test, train.classes, problems)
