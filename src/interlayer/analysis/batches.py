"""Batches of images, from a tensor or from anything that yields them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def image_batches(images: Any, labels: Any = None, *, size: int = 64) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yields batches of images [B, C, H, W] and their labels, or None.

    Args:
        images: images [B, C, H, W], or an iterable of such batches or of batches (images, labels), such as a
            DataLoader.
        labels: the label of every image, [B], if the batches do not contain them.
        size: number of images of a batch, if they are one tensor.

    Raises:
        ValueError: images or labels have another shape, or there are not as many labels as images.
    """
    given = None if labels is None else torch.as_tensor(labels)
    if isinstance(images, Tensor):
        if images.dim() != 4:
            raise ValueError(f"expected images [B, C, H, W], got {tuple(images.shape)}")
        images = images.split(size)
    done = 0
    for batch in images:
        if isinstance(batch, (tuple, list)) and len(batch) > 1 and given is not None:
            raise ValueError("the batches contain labels: leave out labels=")
        pixels, targets = (
            (batch[0], batch[1] if len(batch) > 1 else None) if isinstance(batch, (tuple, list)) else (batch, None)
        )
        if not isinstance(pixels, Tensor) or pixels.dim() != 4:
            raise ValueError(f"expected batches of images [B, C, H, W], got {shape_text(pixels)}")
        if given is not None:
            targets = given[done : done + len(pixels)]
        done += len(pixels)
        if targets is not None and tuple(targets.shape) != (len(pixels),):
            raise ValueError(f"expected one label for each of {len(pixels)} images, got {shape_text(targets)}")
        yield pixels, targets
    if given is not None and len(given) != done:
        raise ValueError(f"expected a label for each of the {done} images, got {len(given)}")


def shape_text(value: Any) -> str:
    """Returns the shape of a tensor, or the type of anything else, for messages."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
