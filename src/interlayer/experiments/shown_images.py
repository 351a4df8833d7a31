"""Some test images of a run, as the input of its network."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..tasks.show import spread
from ..training import TrainingError
from ..training.data import Images, open_data
from .trained import TrainedNetwork

DENSE_SIZE = 224
SHOWN_IMAGES = 64  # number of test images over which attention scores are averaged


def open_test_images(trained: TrainedNetwork) -> Images | None:
    """Opens the test images of a run; None if they cannot be opened by index."""
    test = open_data(trained.recipe.replace(on_bad_image="skip")).test
    return test if isinstance(test, Images) else None


def some_test_images(trained: TrainedNetwork, images: Images, bad: object = (), wanted: int = SHOWN_IMAGES) -> Tensor:
    """Returns up to ``wanted`` evenly spaced test images, transformed and normalized, [B, 3, H, W].

    Images with boxes or masks, which can be large and of different sizes, are cropped to at most 224 x 224 pixels.

    Args:
        bad: the names of images that cannot be used.
    """
    size = trained.transform.size
    if trained.task.annotations != "labels":
        size = min(size, DENSE_SIZE)
    transform = replace(trained.transform, size=size).evaluation()
    readable = [index for index in range(len(images)) if images.name(index) not in bad]  # type: ignore[operator]
    if not readable:
        raise TrainingError(f"none of the test images of {trained.recipe.data} can be read")
    chosen = [readable[i] for i in spread(len(readable), wanted)]
    pixels = torch.stack([torch.as_tensor(transform(images.open(index))) for index in chosen])
    return trained.batch_transform.normalize(pixels.to(trained.device))
