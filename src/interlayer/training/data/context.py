"""The loading context: everything that loading needs besides the images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...tasks import Task
from ..recipe import Recipe
from .augmentation import BatchTransform
from .images import Problems
from .transforms import ImageTransform

Report = Callable[[str, int, int], None]  # the activity, the number done, the total


def no_report(what: str, done: int, total: int) -> None:
    """Ignores the progress of loading."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and the world size. Each rank uses its slice of every batch."""

    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class LoadingContext:
    """How the images of a source are loaded and transformed.

    Args:
        recipe: batch size, augmentation, workers and seed.
        task: collates the targets of a batch, and mixes them if images are mixed.
        transform: resizes images to the network's input size, and holds the mean and std of their normalization.
        ranks: determines the slice of each batch that this process uses.
        device: the device of the batches.
        problems: collects images that cannot be used.
        report: called with the progress of loading.
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
        """The transform of a complete batch on the device."""
        return BatchTransform.of(self.recipe, self.task, self.transform.mean, self.transform.std, self.device)
