"""Image sources: scikit-learn's digits, CIFAR, folders, Hugging Face datasets, WebDataset shards and TFDS.

A source is either map-style (`Images`: any image can be read by its index) or a stream (`Stream`: shards are read
sequentially). `open_data` opens the training, validation and test split of the data that a recipe names, and
`open_data_to_evaluate` the images on which a network is evaluated.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...tasks import task_class
from ..files import TrainingError
from ..recipe import Recipe
from .annotated_sources import open_annotated, open_annotated_to_evaluate
from .cifar import find_cifar, read_cifar
from .class_names import ClassNames
from .dataset import Data, cut
from .folders import shortened
from .hugging_face import HuggingFaceImages
from .image_folders import check_class_count, open_folder, open_folder_to_evaluate
from .images import ArrayImages, Images, Problems, Subset
from .relabeled import open_relabeled_folder
from .streams import Stream


def open_data(recipe: Recipe, problems: Problems | None = None) -> Data:
    """Opens the three splits of the data that a recipe names.

    Args:
        recipe: names the data, its options and the images to hold out of training.
        problems: collects images that cannot be used; created from the recipe if None.
    """
    if task_class(recipe.task).annotations != "labels":
        annotated = open_annotated(recipe)
        _hold_out(annotated, recipe)
        return annotated
    problems = problems or Problems(recipe.on_bad_image)
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
        data = _cifar(path, problems) or open_folder(path, recipe, problems)
    if isinstance(data.train, Images) and isinstance(data.test, Images):
        if recipe.task == "classification" and not recipe.num_classes:
            check_class_count(name, data.classes)
        _check_labels(data, recipe)
        _hold_out(data, recipe)
    elif recipe.validation:
        raise TrainingError(f"validation={recipe.validation:g} cannot be held out of a stream: name a validation_split")
    return data


def open_data_to_evaluate(
    recipe: Recipe, classes: ClassNames, split: str | None, problems: Problems, *, labels: str | None = None
) -> Data:
    """Opens the images on which a network is evaluated, as the test split.

    Args:
        recipe: names the data.
        classes: the classes of the network. Class folders are matched with them by name; other sources must have the
            same classes in the same order.
        split: train, validation or test; if None, the one that `open_folder_to_evaluate` or the source chooses.
        problems: collects images that cannot be used.
        labels: a file with the right labels of ImageNet's validation images, or "real"; see `relabeled`.
    """
    if task_class(recipe.task).annotations != "labels":
        if labels is not None:
            raise TrainingError(f"labels={labels} is for classifiers, not for task={recipe.task}")
        return open_annotated_to_evaluate(recipe, classes.names, split)
    path = Path(recipe.data).expanduser()
    if labels is not None:
        return open_relabeled_folder(path, recipe, classes, split, problems, labels=labels)
    if path.is_dir() and find_cifar(path) is None:
        return open_folder_to_evaluate(path, recipe, classes, split, problems)
    data = open_data(recipe, problems)
    images = getattr(data, split or "test")
    if images is None:
        raise TrainingError(f"{recipe.data} has no {split} split")
    found = list(images.classes)
    matched = classes.match(found)
    in_order = [matched.get(name) for name in found] == list(range(len(classes)))
    if len(classes) and isinstance(images, Images) and not in_order:
        raise TrainingError(
            f"{recipe.data} has other classes than the network: {shortened(found)} instead of "
            f"{shortened(classes.names)}"
        )
    data.test = images
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
    train, held_out = cut(total, count)
    data.train, data.validation = Subset(data.train, train), Subset(data.train, held_out)


def _digits(problems: Problems) -> Data:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.repeat((digits.images * (255 / 16)).astype(np.uint8)[..., None], 3, axis=-1)
    images = ArrayImages(pixels, digits.target, [str(name) for name in digits.target_names], "digits")
    train, test = cut(len(images), 360)
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
