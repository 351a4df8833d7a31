"""The images that figures are drawn for: image files, test images of a run, or a sample photograph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..tasks import Classification
from ..tasks.show import spread
from ..training import TrainingError
from ..training.data import Images, open_data
from ..training.data.images import EncodedImage, FileImages, unreadable
from .trained import LoadedNetwork, TrainedNetwork

DENSE_SIZE = 224
SHOWN_IMAGES = 64  # number of test images over which attention scores are averaged


@dataclass(frozen=True)
class ShownImages:
    """Images as a network sees them.

    Args:
        names: the name of each image.
        pictures: the images as bytes, cropped and resized for the network, [B, 3, H, W].
        inputs: the same images as the normalized input of the network, on its device, [B, 3, H, W].
        labels: the class of each image; None if unknown.
    """

    names: list[str]
    pictures: Tensor
    inputs: Tensor
    labels: list[int] | None = None

    def __len__(self) -> int:
        return len(self.names)


def shown_images(
    loaded: LoadedNetwork, files: Sequence[Path | EncodedImage] = (), *, wanted: int = SHOWN_IMAGES
) -> ShownImages:
    """Returns the images to draw a figure for.

    Args:
        loaded: the network.
        files: image files. If there are none, test images of the run, or a sample photograph if it is no run.
        wanted: the largest number of test images, which are evenly spaced.

    Raises:
        TrainingError: a file is no image, or the test images of the run cannot be read by index.
    """
    if files:
        return _shown(loaded, FileImages(files), range(len(files)))
    if not isinstance(loaded, TrainedNetwork):
        name, photograph = next(iter(sample_photographs().items()))
        return _transformed(loaded, [name], [photograph()])
    images = open_test_images(loaded)
    if images is None:
        raise _stream_error(loaded)
    return some_test_images(loaded, images, loaded.summary.get("bad_images", ()), wanted)


def show_photograph(loaded: LoadedNetwork, photograph: Image.Image, name: str = "photograph") -> ShownImages:
    """Returns an image that was opened already, as the network sees it."""
    return _transformed(loaded, [name], [photograph])


def whole_image(loaded: LoadedNetwork, file: Path | EncodedImage | None = None) -> ShownImages:
    """Returns one image at the size at which the task evaluates it: whole for detection and segmentation.

    Run it with ``loaded.task.forward(loaded.network, shown.inputs)``, which resizes it as in an evaluation.

    Args:
        file: an image file. If None, the first test image of the run, or a sample photograph if it is no run.
    """
    if loaded.task.annotations == "labels":
        return shown_images(loaded, [file] if file is not None else [], wanted=1)
    images: Images | None = FileImages([file]) if file is not None else None
    if images is None:
        if not isinstance(loaded, TrainedNetwork):
            name, photograph = next(iter(sample_photographs().items()))
            return _normalized(loaded, [name], photograph())
        images = open_test_images(loaded)
    if images is None or not len(images):
        raise TrainingError(
            f"the test images of {loaded.recipe.data} cannot be opened: give an image file with --image"
        )
    names, (opened,) = _opened(images, [0])
    return _normalized(loaded, names, opened)


def _stream_error(trained: LoadedNetwork) -> TrainingError:
    return TrainingError(f"the test images of {trained.recipe.data} are a stream: give image files with --image")


def open_test_images(trained: TrainedNetwork) -> Images | None:
    """Opens the test images of a run; None if they cannot be opened by index."""
    test = open_data(trained.recipe.replace(on_bad_image="skip")).test
    return test if isinstance(test, Images) else None


def some_test_images(trained: LoadedNetwork, images: Images, bad: Any = (), wanted: int = SHOWN_IMAGES) -> ShownImages:
    """Returns up to ``wanted`` evenly spaced test images, with their labels if the task has any.

    Images with boxes or masks, which can be large and of different sizes, are cropped to at most 224 x 224 pixels.

    Args:
        bad: the names of images that cannot be used.
    """
    readable = [index for index in range(len(images)) if images.name(index) not in bad]
    if not readable:
        raise TrainingError(f"none of the test images of {trained.recipe.data} can be read")
    chosen = [readable[place] for place in spread(len(readable), wanted)]
    shown = _shown(trained, images, chosen)
    if not isinstance(trained.task, Classification):
        return shown
    return replace(shown, labels=[images.target(index) for index in chosen])


class ClassImages:
    """Some test images of each class of a run, in batches. ``len`` is the number of images.

    Args:
        trained: the network of a run of classification.
        per_class: the largest number of images of a class, which are evenly spaced.
        batch_size: the largest number of images in a batch.

    Raises:
        TrainingError: the test images cannot be read by index, or none of them can be read.
    """

    def __init__(self, trained: TrainedNetwork, per_class: int, *, batch_size: int = SHOWN_IMAGES) -> None:
        images = open_test_images(trained)
        if images is None:
            raise _stream_error(trained)
        bad = trained.summary.get("bad_images", ())
        by_class: dict[int, list[int]] = {}
        for index in range(len(images)):
            if images.name(index) not in bad:
                by_class.setdefault(images.target(index), []).append(index)
        if not by_class:
            raise TrainingError(f"none of the test images of {trained.recipe.data} can be read")
        self.trained, self.images, self.batch_size = trained, images, batch_size
        self.chosen = [group[place] for _, group in sorted(by_class.items()) for place in spread(len(group), per_class)]

    def __len__(self) -> int:
        return len(self.chosen)

    def __iter__(self) -> Iterator[ShownImages]:
        for start in range(0, len(self.chosen), self.batch_size):
            chosen = self.chosen[start : start + self.batch_size]
            labels = [self.images.target(index) for index in chosen]
            yield replace(_shown(self.trained, self.images, chosen), labels=labels)


def sample_photographs() -> Mapping[str, Callable[[], Image.Image]]:
    """Returns photographs that come with matplotlib and scikit-learn, by name, as functions that load them."""

    def of_matplotlib() -> Image.Image:
        from matplotlib import cbook

        path: Any = cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
        return Image.open(path).convert("RGB")

    def of_sklearn(name: str) -> Callable[[], Image.Image]:
        def load() -> Image.Image:
            from sklearn.datasets import load_sample_image

            return Image.fromarray(np.asarray(load_sample_image(name)))

        return load

    return {
        "Grace Hopper": of_matplotlib,
        "flower": of_sklearn("flower.jpg"),
        "palace": of_sklearn("china.jpg"),
    }


def _shown(loaded: LoadedNetwork, images: Images, chosen: Sequence[int]) -> ShownImages:
    return _transformed(loaded, *_opened(images, chosen))


def _opened(images: Images, chosen: Sequence[int]) -> tuple[list[str], list[Image.Image]]:
    """Returns the names and the images at these places."""
    names, opened = [images.name(index) for index in chosen], []
    for name, index in zip(names, chosen, strict=True):
        try:
            opened.append(images.open(index))
        except Exception as error:  # Pillow raises exceptions of many types for files that are not images
            raise TrainingError(f"{name} cannot be used: {unreadable(error)}; give the file of a photograph") from error
    return names, opened


def _transformed(loaded: LoadedNetwork, names: list[str], images: Sequence[Image.Image]) -> ShownImages:
    size = loaded.transform.size
    if loaded.task.annotations != "labels":
        size = min(size, DENSE_SIZE)
    transform = replace(loaded.transform, size=size).evaluation()
    pictures = torch.stack([torch.as_tensor(np.asarray(transform(image))) for image in images])
    return ShownImages(names, pictures, loaded.batch_transform.normalize(pictures.to(loaded.device)))


def _normalized(loaded: LoadedNetwork, names: list[str], image: Image.Image) -> ShownImages:
    """Returns one image, which is not resized."""
    pictures = torch.as_tensor(np.array(image)).permute(2, 0, 1)[None]
    return ShownImages(names, pictures, loaded.batch_transform.normalize(pictures.to(loaded.device)))
