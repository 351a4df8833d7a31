"""What loading needs to know besides the images: one object instead of a list of arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...tasks import Task
from ..recipe import Recipe
from .images import Problems
from .transforms import BatchTransform, ImageTransform

Report = Callable[[str, int, int], None]  # what is being done, how many of how many


def no_report(what: str, done: int, total: int) -> None:
    """Reports nothing."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and the number of processes. A rank takes its slice of each batch."""

    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class LoadingContext:
    """How the images of a source become batches.

    Args:
        recipe: batch size, augmentation, workers, seed.
        task: collates the targets of a batch, and mixes them where images are mixed.
        transform: turns an image into the network's input size, and says how pixels are normalized.
        ranks: which slice of each batch this process takes.
        device: where batches are needed.
        problems: collects images that cannot be used.
        report: told how loading goes.
    """

    recipe: Recipe
    task: Task
    transform: ImageTransform
    ranks: Ranks
    device: torch.device
    problems: Problems
    report: Report = no_report

    @property
    def batch_transform(self) -> BatchTransform:
        """What is done with a whole batch on the device."""
        return BatchTransform.of(self.recipe, self.task, self.transform.mean, self.transform.std, self.device)
