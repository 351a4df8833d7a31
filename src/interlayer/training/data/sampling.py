"""The order in which workers load the images of a run, in batches."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.utils.data import Sampler

from .base import TrainBatches, epoch_order, place_in_pass
from .images import Images
from .seeds import mixed_seed


class EpochSampler(Sampler):
    """Yields the keys of `LoadedImages`, in batches, epoch after epoch.

    The images of the next epoch thus begin to load before it does, while the network is evaluated.

    Attributes:
        begin: the epoch and the step in it with which the next iteration begins.
    """

    def __init__(self, count: int, batches: TrainBatches) -> None:
        # Not the batches themselves: a cycle of references would keep the workers of batches that nobody closed.
        self.count, self.recipe, self.ranks = count, batches.recipe, batches.ranks
        self.steps, self.pass_steps = batches.steps, batches.pass_steps
        self.images_per_rank = batches.images_per_rank
        self.begin = 0, 0
        self._order: tuple[int, Tensor] | None = None

    def order(self, number: int) -> Tensor:
        """Returns the order of the images in a pass."""
        return epoch_order(self.count, self.recipe, number)

    def indices(self, epoch: int, step: int) -> list[tuple[int, int]]:
        """Returns the keys of this rank's batch in a step of an epoch."""
        number, place = place_in_pass(epoch, step, self.steps, self.pass_steps)
        if self._order is None or self._order[0] != number:
            self._order = number, self.order(number)
        order = self._order[1]
        first = place * self.recipe.batch_size + self.ranks.rank * self.images_per_rank
        return [
            (mixed_seed("image", self.recipe.seed, number, index), int(order[index]))
            for index in range(first, first + self.images_per_rank)
        ]

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        steps, (epoch, start) = self.steps, self.begin
        last = max(self.recipe.epochs, epoch + 1)  # what follows the last one would not be used
        for step in range(epoch * steps + start, last * steps):
            yield self.indices(*divmod(step, steps))


def make_sampler(images: Images, batches: TrainBatches) -> EpochSampler:
    """Returns the sampler of a source: by aspect ratio if its images have different ones and keep them."""
    from .aspect_ratio import AspectRatioSampler

    ratios = images.aspect_ratios
    return EpochSampler(len(images), batches) if ratios is None else AspectRatioSampler(ratios, batches)
