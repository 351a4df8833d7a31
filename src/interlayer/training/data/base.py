"""Base classes of batches: the order of an epoch, the slice of a rank, and the random numbers of a step.

Step s of a pass over the images uses images s B to (s + 1) B of its order, and rank r uses the r-th slice of them. An
epoch is one pass, unless the recipe sets its number of steps. The random numbers for an image that workers augment are
seeded with (seed, pass, position in the pass), those for a batch on the device with (seed, epoch, step, rank). A run
that is resumed at any step, or with another number of workers, therefore sees the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..files import TrainingError
from ..recipe import Recipe
from .context import LoadingContext, Ranks
from .seeds import mixed_seed

Item = TypeVar("Item")


@contextmanager
def open_batches(batches: Iterable[Item]) -> Iterator[Iterator[Item]]:
    """Iterates over batches, and ends the workers that load them when the block is left, unless they go on.

    Without it, the traceback of an exception would keep the workers, for which Python waits when it exits.
    """
    iterator = iter(batches)
    try:
        yield iterator
    finally:
        if isinstance(iterator, Generator):
            iterator.close()


def epoch_order(count: int, recipe: Recipe, epoch: int) -> Tensor:
    """Returns the order of the images in a pass, which is an epoch unless the recipe has epoch_steps.

    With repeated augmentation (Hoffer et al., 2020), each image is repeated several times in a row. The epoch keeps its
    length and therefore contains only some of the images.
    """
    generator = torch.Generator().manual_seed(mixed_seed("order", recipe.seed, epoch))
    order = torch.randperm(count, generator=generator)
    if recipe.repeated_augmentation > 1:
        order = order.repeat_interleave(recipe.repeated_augmentation)[:count]
    return order


def place_in_pass(epoch: int, step: int, steps: int, pass_steps: int) -> tuple[int, int]:
    """Returns the pass over the images in which a step of an epoch of `steps` is, and its place in the pass."""
    return divmod(epoch * steps + step, pass_steps)


class TrainBatches:
    """Training batches of one epoch at a time, starting at any step.

    Args:
        count: the number of images.
        context: how images are loaded and transformed.

    Attributes:
        steps: number of steps in an epoch.
        pass_steps: number of steps in one pass over the images, which is an epoch unless the recipe has epoch_steps.
        images_per_rank: number of images of each step that this rank uses.
        generator: the random number generator of `transform_batch`, on the device.
        exact_resume: whether an epoch can be resumed at any step.
    """

    exact_resume = True

    def __init__(self, count: int, context: LoadingContext) -> None:
        self.recipe, self.ranks, self.device = context.recipe, context.ranks, context.device
        self.batch_transform = context.batch_transform
        self.pass_steps, self.images_per_rank = _step_sizes(count, self.recipe, self.ranks)
        self.steps = self.recipe.epoch_steps or self.pass_steps
        self.generator = torch.Generator(self.device)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yields the batches of an epoch from step `start` on, in the form that `transform_batch` expects."""
        raise NotImplementedError

    def transform_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns augmented images and targets on the device."""
        pixels, targets = batch
        return self.batch_transform(pixels, targets, self.generator)

    def position(self, epoch: int, step: int) -> tuple[int, int]:
        """Returns the pass over the images in which a step of an epoch is, and its place in the pass."""
        return place_in_pass(epoch, step, self.steps, self.pass_steps)

    def names(self, epoch: int, step: int) -> list[str]:
        """Returns the names of the images of this rank's batch."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what loads batches, such as worker processes. Another epoch would start it again."""

    def seed(self, epoch: int, step: int) -> None:
        """Seeds the generator of `transform_batch` for this step."""
        self.generator.manual_seed(mixed_seed("batch", self.recipe.seed, epoch, step, self.ranks.rank))


class EvalBatches:
    """Evaluation batches of equal shape. The last one is padded.

    Attributes:
        count: the number of images.
    """

    count: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields bytes [B, 3, H, W], targets, and indices into the source [B] (-1 for padding), all on the device."""
        raise NotImplementedError


def _step_sizes(count: int, recipe: Recipe, ranks: Ranks) -> tuple[int, int]:
    """Returns the number of steps in a pass over the images and the number of images that one rank uses in a step."""
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
    """Returns the indices of the images that this rank evaluates, [steps, batch_size], padded with -1."""
    mine = torch.arange(ranks.rank, count, ranks.world_size)
    steps = math.ceil(math.ceil(count / ranks.world_size) / batch_size)
    padded = torch.full((steps * batch_size,), -1, dtype=torch.int64)
    padded[: len(mine)] = mine
    return padded.view(steps, batch_size)
