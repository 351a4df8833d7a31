"""Batches of images with similar aspect ratios, which need little padding: wide images and tall images apart.

The order of an epoch is a permutation that depends only on seed and epoch, as that of `epoch_order`, so that a run
can be resumed at any step, and all ranks use slices of the same batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import TrainBatches
from .sampling import EpochSampler


def grouped_order(order: Tensor, groups: Tensor, batch_size: int) -> Tensor:
    """Rearranges an order such that each batch consists of images of one group.

    A batch is placed where its last image was. The images that fill no batch of their group follow at the end, group
    by group, so that only those batches are mixed.

    Args:
        order: indices of images, [N].
        groups: the group of each image, whole numbers, by index.
        batch_size: the number of images in a batch, over all ranks.
    """
    of_place = groups[order]
    batches: list[tuple[int, Tensor]] = []
    rest = []
    for group in of_place.unique().tolist():
        places = (of_place == group).nonzero().flatten()
        full = len(places) // batch_size * batch_size
        batches += [(int(batch[-1]), order[batch]) for batch in places[:full].split(batch_size) if len(batch)]
        rest.append(order[places[full:]])
    batches.sort(key=lambda entry: entry[0])
    return torch.cat([*(batch for _, batch in batches), *rest])


class AspectRatioSampler(EpochSampler):
    """Yields the keys of images in batches of wide or of tall images.

    Args:
        aspect_ratios: width divided by height of each image, [N].
        batches: the batches that use the sampler.
    """

    def __init__(self, aspect_ratios: Tensor, batches: TrainBatches) -> None:
        super().__init__(len(aspect_ratios), batches)
        self.groups = (aspect_ratios >= 1).long()

    def order(self, number: int) -> Tensor:
        return grouped_order(super().order(number), self.groups, self.recipe.batch_size)
