"""Where images come from: embedded digits, CIFAR, folders, Hugging Face datasets, WebDataset shards, TFDS.

A source is either map-style (`Images`: any image by its index, with its label known beforehand) or a stream (`Stream`:
shards read in order). What cannot be used (no image, empty class, label out of range) is never passed over in silence:
it is counted and named, and stops the run unless the recipe says `on_bad_image: skip`.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from .files import TrainingError
from .recipe import Recipe

logger = logging.getLogger(__name__)
SHOWN = 5  # names in a message; all of them are in summary.json


class Problems:
    """Images that cannot be used: name -> reason. Raises at the first where the recipe does not allow them."""

    def __init__(self, on_bad_image: str) -> None:
        self.allowed = on_bad_image == "skip"
        self.found: dict[str, str] = {}

    def add(self, found: dict[str, str]) -> None:
        """Note what was found; stop here if the run is to stop."""
        new = {name: reason for name, reason in found.items() if name not in self.found}
        self.found.update(new)
        if not new:
            return
        first = next(iter(new))
        count = f"{len(new)} images cannot be used; the first is {first}" if len(new) > 1 else f"{first} cannot be used"
        if not self.allowed:
            raise TrainingError(
                f"{count}: {new[first]}; mend or remove it, or go on without such images with on_bad_image=skip"
            )
        others = list(new)[1:SHOWN]
        logger.warning(
            "%s: %s%s; going on without", count, new[first], f" (also {', '.join(others)})" if others else ""
        )


class Images(ABC):
    """A map-style source."""

    classes: Sequence[str]
    labels: np.ndarray  # [N], whole numbers

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def name(self, index: int) -> str:
        """What a person finds the image by."""

    @abstractmethod
    def open(self, index: int) -> Image.Image:
        """The image as RGB. Raises where it is none."""


class ArrayImages(Images):
    """Images that are one array [N, H, W, 3] of bytes."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, classes: Sequence[str], what: str) -> None:
        self.pixels, self.labels, self.classes, self.what = pixels, np.asarray(labels), classes, what

    def name(self, index: int) -> str:
        return f"{self.what} image {index}"

    def open(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index])


def open_rgb(path: str | Path) -> Image.Image:
    """An image file, read whole. Raises where it is none."""
    with Image.open(path) as image:
        return image.convert("RGB")


class FolderImages(Images):
    """A folder of class folders, each with its images at any depth."""

    def __init__(self, root: Path, classes: Sequence[str] | None, problems: Problems) -> None:
        self.root = root
        found = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
        if not found:
            raise TrainingError(f"{root} holds no class folders: expected {root}/CLASS/IMAGE")
        self.classes = list(classes) if classes is not None else found
        loose = sorted(entry.path for entry in os.scandir(root) if entry.name.lower().endswith(IMG_EXTENSIONS))
        unusable = dict.fromkeys(loose, "it lies outside the class folders")
        self.files: list[str] = []
        labels = []
        index = {name: i for i, name in enumerate(self.classes)}
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
        self.labels = np.array(labels, dtype=np.int64)
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


class HuggingFaceImages(Images):
    """A Hugging Face dataset, through timm's reader."""

    def __init__(self, name: str, split: str, options: dict[str, Any]) -> None:
        try:
            from timm.data.readers.reader_hfds import ReaderHfds
        except ImportError as error:
            raise TrainingError(f"hfds/{name} needs Hugging Face datasets: pip install datasets") from error
        try:
            self.reader = ReaderHfds(name, split=split, **options)
        except Exception as error:
            raise TrainingError(
                f"hfds/{name}, split {split!r}, cannot be opened: {' '.join(str(error).split())}"
            ) from error
        self.what = f"hfds/{name} {split}"
        self.labels = np.array(self.reader.dataset[self.reader.label_key], dtype=np.int64)
        names = sorted(self.reader.class_to_idx, key=self.reader.class_to_idx.__getitem__)
        self.classes = names or [str(i) for i in range(int(self.labels.max()) + 1)]

    def name(self, index: int) -> str:
        path = self.reader._filename(index)
        return f"{self.what} image {index}" + (f" ({path})" if path else "")

    def open(self, index: int) -> Image.Image:
        file, _ = self.reader[index]
        with file, Image.open(file if isinstance(file, io.BytesIO) else io.BytesIO(file.read())) as image:
            return image.convert("RGB")


class Subset(Images):
    """Some images of a source."""

    def __init__(self, images: Images, indices: Sequence[int] | np.ndarray) -> None:
        self.images, self.indices = images, np.asarray(indices, dtype=np.int64)
        self.classes, self.labels = images.classes, images.labels[self.indices]

    def name(self, index: int) -> str:
        return self.images.name(int(self.indices[index]))

    def open(self, index: int) -> Image.Image:
        return self.images.open(int(self.indices[index]))


class Stream:
    """Shards read in order, through timm's readers: WebDataset, TFDS, streamed Hugging Face datasets.

    Args:
        name: wds/..., tfds/... or hfids/...
        split: the reader's split; for WebDataset also a shell-style list of shards with the number of images,
            train-{0000..0007}.tar|8000.
    """

    def __init__(self, name: str, root: str, split: str, *, training: bool, recipe: Recipe) -> None:
        from timm.data.readers import create_reader

        kind = name.split("/")[0]
        self.name, self.kind, self.split = name, kind, split
        options = {k: v for k, v in recipe.data_options.items() if not k.endswith("_split")}
        package = {"wds": "webdataset", "tfds": "tensorflow_datasets", "hfids": "datasets"}[kind]
        try:
            __import__(package)
        except ImportError as error:
            raise TrainingError(f"{name} needs {package}: pip install {package.replace('_', '-')}") from error
        try:
            self.reader = create_reader(
                name, root, split, is_training=training, batch_size=recipe.batch_size, seed=recipe.seed, **options
            )
        except Exception as error:
            raise TrainingError(f"{name}, split {split!r}, cannot be opened: {' '.join(str(error).split())}") from error
        if not training:  # each process reads all of it, and takes its share of the batches
            for attribute, value in (("dist_rank", 0), ("dist_num_replicas", 1)):
                if hasattr(self.reader, attribute):
                    setattr(self.reader, attribute, value)
        self.classes: list[str] = [str(i) for i in range(recipe.num_classes or 0)]
        if not self.classes:
            raise TrainingError(f"{name} is a stream, which does not tell its classes: give num_classes=N")

    def __len__(self) -> int:
        return int(self.reader.num_samples)


@dataclass
class Data:
    """The three parts of a dataset.

    Args:
        train: what is trained on.
        validation: held out to choose the epoch; None where the test images are evaluated every epoch instead.
        test: what is reported.
        classes: names, by label.
        notes: what was decided about the parts, for the user.
        problems: what could not be used.
    """

    train: Images | Stream
    validation: Images | Stream | None
    test: Images | Stream
    classes: list[str]
    problems: Problems
    notes: list[str] = field(default_factory=list)


def open_data(recipe: Recipe) -> Data:
    """The data a recipe names, in its three parts."""
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
    count = recipe.num_classes or len(data.classes)
    if recipe.num_classes:
        data.classes = [*data.classes[:count], *(str(i) for i in range(len(data.classes), count))]
    for part in ("train", "validation", "test"):
        images = getattr(data, part)
        if images is None:
            continue
        outside = np.flatnonzero((images.labels < 0) | (images.labels >= count))
        if len(outside):
            data.problems.add(
                {
                    images.name(
                        int(i)
                    ): f"its label {images.labels[i]} is outside 0 to {count - 1}, the {count} classes"
                    for i in outside
                }
            )
            setattr(data, part, Subset(images, np.setdiff1d(np.arange(len(images)), outside)))


def _hold_out(data: Data, recipe: Recipe) -> None:
    """Validation images out of the training images, the same ones for every seed."""
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
    """Noise of any size, to measure speed with."""
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
    for folder, key, train_files, test_file, meta, meta_key in (
        (
            "cifar-10-batches-py",
            "labels",
            [f"data_batch_{i}" for i in range(1, 6)],
            "test_batch",
            "batches.meta",
            "label_names",
        ),
        ("cifar-100-python", "fine_labels", ["train"], "test", "meta", "fine_label_names"),
    ):
        root = path if path.name == folder else path / folder
        if not root.is_dir():
            continue
        classes = list(_unpickle(root / meta)[meta_key])

        def read(files: list[str], root: Path = root, key: str = key, classes: list[str] = classes) -> ArrayImages:
            parts = [_unpickle(root / name) for name in files]
            pixels = np.concatenate([np.asarray(part["data"], np.uint8) for part in parts])
            pixels = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            labels = np.concatenate([np.asarray(part[key], np.int64) for part in parts])
            if len(labels) != len(pixels):
                raise TrainingError(f"{root} holds {len(pixels)} images and {len(labels)} labels: it is damaged")
            return ArrayImages(np.ascontiguousarray(pixels), labels, classes, f"{root}/{files[0]}")

        return Data(read(train_files), None, read([test_file]), classes, problems)
    return None


class _PlainUnpickler(pickle.Unpickler):
    """CIFAR's files are pickles of arrays: nothing else is allowed to be made from them."""

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
    parts = {
        name: next((FolderImages(path / f, classes, problems) for f in folders if (path / f).is_dir()), None)
        for name, folders in (("validation", ("val", "validation", "valid")), ("test", ("test",)))
    }
    if parts["test"] is None and parts["validation"] is None:
        rest, held_out = _cut(len(images), max(1, len(images) // 10))
        note = f"{path} has neither a test nor a val folder: a tenth of train, the same for every seed, is the test"
        return Data(Subset(images, rest), None, Subset(images, held_out), classes, problems, [note])
    if parts["test"] is None:
        assert parts["validation"] is not None
        return Data(images, None, parts["validation"], classes, problems)
    return Data(images, parts["validation"], parts["test"], classes, problems)


def _hugging_face(recipe: Recipe, problems: Problems) -> Data:
    name = recipe.data.split("/", 1)[1]
    options = dict(recipe.data_options)
    splits = {part: options.pop(f"{part}_split", None) for part in ("train", "validation", "test")}
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
