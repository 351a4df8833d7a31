"""Augmentation of a complete batch on its device: pad and crop, flip, random erasing, Mixup, CutMix.

`BatchTransform` normalizes a batch, erases and mixes. Resident images are also padded, cropped and flipped on the
device (`crop_and_flip`).

timm augments one PIL image at a time, and draws the Mixup ratio of a batch on the host. Here all random numbers are
tensors drawn from the given generator, so that a batch takes a few kernels and a captured CUDA graph draws new numbers
at each replay. The distributions are timm's: random erasing tries ten boxes (`timm.data.random_erasing`), CutMix
corrects its ratio for the clipped box, and image i is mixed with image B - 1 - i (`timm.data.mixup`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ...tasks import Task
from ..recipe import Recipe

ERASING_TRIES = 10
ERASING_AREA = (0.02, 1 / 3)
ERASING_RATIO = 0.3  # the smallest aspect ratio; the largest is its inverse


def crop_and_flip(images: Tensor, padding: int, flip: float, generator: Generator) -> Tensor:
    """Pads with zeros, crops to the original size at random offsets, and flips horizontally with probability `flip`.

    Args:
        images: [B, C, H, W].
    """
    if not padding and not flip:
        return images
    count, channels, height, width = images.shape
    device = images.device
    rows = torch.arange(height, device=device).expand(count, -1)
    columns = torch.arange(width, device=device).expand(count, -1)
    if flip:
        mirrored = torch.rand(count, 1, device=device, generator=generator) < flip
        columns = torch.where(mirrored, width - 1 - columns, columns)
    if padding:
        shifts = torch.randint(0, 2 * padding + 1, (2, count, 1), device=device, generator=generator)
        rows, columns = rows + shifts[0], columns + shifts[1]
        images = F.pad(images, (padding, padding, padding, padding))
    which = torch.arange(count, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    return images[which, channel, rows[:, None, :, None], columns[:, None, None, :]]


def erase(images: Tensor, probability: float, mode: str, generator: Generator) -> Tensor:
    """Applies random erasing (Zhong et al., 2020) to normalized images.

    A box of 2 to 33% of the area is replaced by noise (mode "pixel") or zeros (mode "const").

    Args:
        images: [B, C, H, W].
    """
    if not probability:
        return images
    count, _, height, width = images.shape
    device = images.device
    draws = torch.rand(4, count, ERASING_TRIES, device=device, generator=generator)
    area = (ERASING_AREA[0] + draws[0] * (ERASING_AREA[1] - ERASING_AREA[0])) * height * width
    ratio = torch.exp((2 * draws[1] - 1) * math.log(1 / ERASING_RATIO))
    tall, wide = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (tall < height) & (wide < width)
    first = fits.int().argmax(dim=1, keepdim=True)  # the first box that fits
    tall, wide = tall.gather(1, first), wide.gather(1, first)
    top = (draws[2].gather(1, first) * (height - tall + 1)).floor()
    left = (draws[3].gather(1, first) * (width - wide + 1)).floor()
    chosen = (torch.rand(count, 1, device=device, generator=generator) < probability) & fits.any(1, keepdim=True)
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    inside_rows = (rows >= top) & (rows < top + tall) & chosen
    inside_columns = (columns >= left) & (columns < left + wide)
    box = inside_rows[:, None, :, None] & inside_columns[:, None, None, :]
    if mode == "const":
        return images.masked_fill(box, 0.0)
    noise = torch.randn(images.shape, device=device, dtype=images.dtype, generator=generator)
    return torch.where(box, noise, images)


def mix(images: Tensor, targets: Tensor, recipe: Recipe, generator: Generator) -> tuple[Tensor, Tensor]:
    """Applies Mixup (Zhang et al., 2017) or CutMix (Yun et al., 2019) to images i and B - 1 - i of the batch.

    Args:
        images: [B, C, H, W], normalized.
        targets: [B, K], as returned by the task's `mixable`.
    """
    device = images.device
    draws = torch.rand(5, device=device, generator=generator)
    mixes = draws[0] < recipe.mix_probability
    cuts = draws[1] < (recipe.mix_switch if recipe.mixup and recipe.cutmix else float(recipe.cutmix > 0))
    partners, partner_targets = images.flip(0), targets.flip(0)
    kept = torch.ones((), device=device)  # the weight of the image, as opposed to its partner
    mixed = images
    if recipe.mixup:
        ratio = torch.where(mixes & ~cuts, _beta(recipe.mixup, device, generator), 1.0)
        kept = ratio
        mixed = mixed * ratio.to(images.dtype) + partners * (1 - ratio).to(images.dtype)
    if recipe.cutmix:
        height, width = images.shape[-2:]
        side = (1 - _beta(recipe.cutmix, device, generator)).sqrt()
        ranges = []
        for size, center in ((height, draws[2]), (width, draws[3])):
            half = (side * size).floor() // 2
            middle = (center * size).floor()
            ranges.append(((middle - half).clamp(0, size), (middle + half).clamp(0, size)))
        (top, bottom), (left, right) = ranges
        rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
        box = ((rows >= top) & (rows < bottom))[:, None] & ((columns >= left) & (columns < right))[None, :]
        box = box & mixes & cuts
        mixed = torch.where(box, partners, mixed)
        kept = torch.where(mixes & cuts, 1 - box.sum() / (height * width), kept)
    return mixed, targets * kept + partner_targets * (1 - kept)


def _beta(alpha: float, device: torch.device, generator: Generator) -> Tensor:
    """Samples Beta(alpha, alpha) from two Gamma samples, as torch.distributions does."""
    gammas = torch._standard_gamma(torch.full((2,), alpha, device=device), generator=generator)
    return gammas[0] / gammas.sum().clamp_min(1e-30)


@dataclass(frozen=True)
class BatchTransform:
    """The transform of a batch on its device: normalization, random erasing, and Mixup or CutMix.

    Args:
        recipe: the augmentations and their strengths.
        task: converts targets to a form that can be averaged.
        mean, std: mean and standard deviation of bytes, [1, C, 1, 1].
    """

    recipe: Recipe
    task: Task
    mean: Tensor
    std: Tensor

    @classmethod
    def of(
        cls, recipe: Recipe, task: Task, mean: Sequence[float], std: Sequence[float], device: torch.device
    ) -> BatchTransform:
        """Returns the transform, given the mean and std of values from 0 to 1."""
        as_bytes = (torch.tensor(values, device=device).view(1, -1, 1, 1) * 255 for values in (mean, std))
        return cls(recipe, task, *as_bytes)

    def normalize(self, images: Tensor) -> Tensor:
        """Normalizes bytes [B, C, H, W] to floats, in the memory format of the recipe."""
        return self._in_format((images.float() - self.mean) / self.std)

    def __call__(self, images: Tensor, targets: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """Returns augmented images and their targets. Mixed targets have the form that the task's `mixable` returns."""
        recipe = self.recipe
        images = erase(self.normalize(images), recipe.erasing, recipe.erasing_mode, generator)
        if recipe.mixes:
            images, targets = mix(images, self.task.mixable(targets), recipe, generator)
        return self._in_format(images), targets

    def _in_format(self, images: Tensor) -> Tensor:
        return images.contiguous(memory_format=torch.channels_last) if self.recipe.channels_last else images
