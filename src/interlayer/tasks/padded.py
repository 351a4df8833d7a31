"""Batches of images of different sizes, which are padded at the right and at the bottom. Targets hold the sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

Size = tuple[int, int]  # height and width


class PaddedTargets:
    """The targets of a padded batch, which can be moved, pinned and split as a tensor can.

    Args:
        sizes: height and width of each image without its padding.
        targets: the target of each image: a dictionary of tensors, or a tensor.
    """

    def __init__(self, sizes: Sequence[Size], targets: Sequence[Any]) -> None:
        self.sizes, self.targets = list(sizes), list(targets)

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.targets)

    def to(self, device: torch.device, non_blocking: bool = False) -> PaddedTargets:
        """Moves all tensors to a device."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PaddedTargets:
        """Copies all tensors to pinned memory. PyTorch's `DataLoader` calls this."""
        return self._mapped(lambda tensor: tensor.pin_memory())

    def tensor_split(self, count: int) -> list[PaddedTargets]:
        """Splits the targets along the batch, as `torch.Tensor.tensor_split` does."""
        places = torch.arange(len(self)).tensor_split(count)
        return [PaddedTargets([self.sizes[i] for i in p], [self.targets[i] for i in p]) for p in places]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles all tensors of one dtype as one, because workers send each tensor with a file of its own."""
        leaves, structure = tree_flatten(self.targets)
        groups: dict[torch.dtype, list[int]] = {}
        for place, leaf in enumerate(leaves):
            groups.setdefault(leaf.dtype, []).append(place)
        packed = [(places, torch.cat([leaves[place].flatten() for place in places])) for places in groups.values()]
        place_of = tree_unflatten(range(len(leaves)), structure)  # torch 2.11 warns where a structure is unpickled
        return _unpacked, (self.sizes, place_of, [tuple(leaf.shape) for leaf in leaves], packed)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> PaddedTargets:
        targets = [
            {key: function(value) for key, value in target.items()} if isinstance(target, dict) else function(target)
            for target in self.targets
        ]
        return PaddedTargets(self.sizes, targets)


def _unpacked(sizes: Sequence[Size], place_of: Any, shapes: Sequence[Any], packed: Sequence[Any]) -> PaddedTargets:
    """Returns the targets that `PaddedTargets.__reduce__` packed."""
    leaves: list[Any] = [None] * len(shapes)
    for places, values in packed:
        parts = values.split([math.prod(shapes[place]) for place in places])
        for place, part in zip(places, parts, strict=True):
            leaves[place] = part.view(shapes[place])
    return PaddedTargets(sizes, tree_map(leaves.__getitem__, place_of))


def pad_together(images: Sequence[Tensor], value: int = 0) -> Tensor:
    """Stacks tensors [..., H, W] of different sizes, padded at the right and at the bottom with ``value``."""
    height, width = (max(image.shape[axis] for image in images) for axis in (-2, -1))
    if all(image.shape[-2:] == (height, width) for image in images):
        return torch.stack(list(images))
    batch = images[0].new_full((len(images), *images[0].shape[:-2], height, width), value)
    for index, image in enumerate(images):  # not over rows of the batch: autograd refuses to change several views
        batch[index, ..., : image.shape[-2], : image.shape[-1]] = image
    return batch


def sizes_of(images: Tensor, targets: Any) -> list[Size]:
    """Returns the sizes of the images of a batch, which are not padded if there are no targets."""
    if isinstance(targets, PaddedTargets):
        return targets.sizes
    height, width = images.shape[-2:]
    return [(height, width)] * len(images)
