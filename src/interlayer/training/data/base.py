"""What all batches have in common: the order of an epoch, the slice of a rank, the draws of a step.

Step s of an epoch takes images s B to (s + 1) B of the epoch's order, and rank r of R its r-th slice of them. The draws
of an image that workers augment come from (seed, epoch, place in the epoch), those of a batch on the device from
(seed, epoch, step, rank). A run that is resumed at any step, or with another number of workers, therefore sees the same
batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..files import TrainingError
from ..recipe import Recipe
from .context import LoadingContext, Ranks
from .seeds import mixed_seed


def epoch_order(count: int, recipe: Recipe, epoch: int) -> Tensor:
    """Returns the order of an epoch.

    With repeated augmentation (Hoffer et al., 2020) each image comes several times in a row and the epoch keeps its
    length, so that it shows only some of the images.
    """
    generator = torch.Generator().manual_seed(mixed_seed("order", recipe.seed, epoch))
    order = torch.randperm(count, generator=generator)
    if recipe.repeated_augmentation > 1:
        order = order.repeat_interleave(recipe.repeated_augmentation)[:count]
    return order


class TrainBatches:
    """Training batches, one epoch at a time, from any step on.

    Args:
        count: the number of images.
        context: how they become batches.

    Attributes:
        steps: steps of an epoch.
        images_per_rank: images of each step that this rank takes.
        generator: on the device; `transform_batch` draws from it.
        exact_resume: whether an epoch can be entered in its middle.
    """

    exact_resume = True

    def __init__(self, count: int, context: LoadingContext) -> None:
        self.recipe, self.ranks, self.device = context.recipe, context.ranks, context.device
        self.batch_transform = context.batch_transform
        self.steps, self.images_per_rank = _step_sizes(count, self.recipe, self.ranks)
        self.generator = torch.Generator(self.device)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yields the batches of an epoch, from step `start` on, as `transform_batch` takes them."""
        raise NotImplementedError

    def transform_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns images and targets on the device, augmented."""
        pixels, targets = batch
        return self.batch_transform(pixels, targets, self.generator)

    def names(self, epoch: int, step: int) -> list[str]:
        """Returns the names of the images of this rank's batch."""
        raise NotImplementedError

    def seed(self, epoch: int, step: int) -> None:
        """Sets the draws of `transform_batch` to those of this step."""
        self.generator.manual_seed(mixed_seed("batch", self.recipe.seed, epoch, step, self.ranks.rank))


class EvalBatches:
    """Evaluation batches of equal shape: the last one is padded.

    Attributes:
        count: the number of images.
    """

    count: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields bytes [B, 3, H, W], targets, and places in the source [B] (-1 for padding), on the device."""
        raise NotImplementedError


def _step_sizes(count: int, recipe: Recipe, ranks: Ranks) -> tuple[int, int]:
    """Returns the steps of an epoch and the images of a step that one rank takes."""
    if recipe.batch_size % (ranks.world_size * recipe.accumulate):
        raise TrainingError(
            f"batch_size={recipe.batch_size} cannot be cut into {ranks.world_size} processes x accumulate="
            f"{recipe.accumulate} equal parts"
        )
    if count < recipe.batch_size:
        raise TrainingError(
            f"batch_size={recipe.batch_size} is more than the {count} training images: give a smaller batch_size"
        )
    return count // recipe.batch_size, recipe.batch_size // ranks.world_size


def eval_places(count: int, batch_size: int, ranks: Ranks) -> Tensor:
    """Returns which images this rank evaluates, [steps, batch_size], with -1 as padding."""
    mine = torch.arange(ranks.rank, count, ranks.world_size)
    steps = math.ceil(math.ceil(count / ranks.world_size) / batch_size)
    padded = torch.full((steps * batch_size,), -1, dtype=torch.int64)
    padded[: len(mine)] = mine
    return padded.view(steps, batch_size)
