"""Resident images, which are kept on the device. Batches are gathered and augmented there, without workers."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from ..files import TrainingError
from .augmentation import crop_and_flip
from .base import EvalBatches, TrainBatches, epoch_order, eval_places
from .context import LoadingContext
from .images import Images, unreadable

RESIDENT_BYTES = 2 * 2**30  # larger sources are loaded by workers instead
LOADING_THREADS = 16
REPORT_SECONDS = 0.2


class ResidentImages:
    """The images of a source, kept on the device as bytes [N, 3, H, W].

    Args:
        images: the source. Images that cannot be read are added to the problems of the context and left out.
        context: the transform of the images and their device.
    """

    def __init__(self, images: Images, context: LoadingContext) -> None:
        transform, size = context.transform.evaluation(), context.transform.size
        pixels = torch.empty(len(images), 3, size, size, dtype=torch.uint8)
        unusable: dict[int, str] = {}

        def load(index: int) -> None:
            try:
                pixels[index] = torch.as_tensor(np.asarray(transform(images.open(index))))
            except Exception as error:
                unusable[index] = unreadable(error)

        reported = time.monotonic()
        with ThreadPoolExecutor(LOADING_THREADS) as pool:
            for done, _ in enumerate(pool.map(load, range(len(images)), chunksize=64), 1):
                if time.monotonic() - reported > REPORT_SECONDS:
                    reported = time.monotonic()
                    context.report("loading images", done, len(images))
        context.problems.add({images.name(i): unusable[i] for i in sorted(unusable)})
        kept = np.setdiff1d(np.arange(len(images)), list(unusable))
        if not len(kept):
            raise TrainingError("none of the images can be read")
        self.source = images
        self.places = torch.as_tensor(kept).to(context.device)  # indices into the source
        self.pixels = (pixels[kept] if unusable else pixels).to(context.device)
        targets = context.task.collate_targets([images.target(int(i)) for i in kept])
        self.targets: Tensor = targets.to(context.device)

    @classmethod
    def of(cls, images: Images, context: LoadingContext) -> ResidentImages:
        """Returns the copy of the source on the device. It is created once, see `Images.resident`."""
        key = context.transform, context.task.name, str(context.device)
        if key not in images.resident:
            images.resident[key] = cls(images, context)
        return images.resident[key]

    def __len__(self) -> int:
        return len(self.pixels)

    def name(self, index: int) -> str:
        return self.source.name(int(self.places[index]))


class ResidentTrainBatches(TrainBatches):
    """Training batches gathered and augmented on the device. A batch is a tensor of image indices."""

    def __init__(self, images: ResidentImages, context: LoadingContext) -> None:
        super().__init__(len(images), context)
        self.images = images

    @classmethod
    def of(cls, images: Images, context: LoadingContext) -> ResidentTrainBatches:
        """Copies a source to the device and returns its batches. Images are not center-cropped: training crops them."""
        uncropped = dataclasses.replace(context, transform=dataclasses.replace(context.transform, crop_pct=1.0))
        return cls(ResidentImages.of(images, uncropped), context)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        step = start
        while step < self.steps:
            number, first = self.position(epoch, step)
            order = epoch_order(len(self.images), self.recipe, number)[: self.pass_steps * self.recipe.batch_size]
            mine = order.view(self.pass_steps, self.ranks.world_size, self.images_per_rank)[first:, self.ranks.rank]
            mine = mine[: self.steps - step]
            if self.device.type == "cuda":
                mine = mine.pin_memory().to(self.device, non_blocking=True)
            yield from mine
            step += len(mine)

    def transform_batch(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        padding = self.recipe.padding if self.recipe.crop == "padded" else 0
        pixels = crop_and_flip(self.images.pixels[batch], padding, self.recipe.flip, self.generator)
        return self.batch_transform(pixels, self.images.targets[batch], self.generator)

    def names(self, epoch: int, step: int) -> list[str]:
        number, place = self.position(epoch, step)
        order = epoch_order(len(self.images), self.recipe, number)
        first = place * self.recipe.batch_size + self.ranks.rank * self.images_per_rank
        return [self.images.name(int(i)) for i in order[first : first + self.images_per_rank]]


class ResidentEvalBatches(EvalBatches):
    """Evaluation batches gathered on the device."""

    def __init__(self, images: ResidentImages, batch_size: int, context: LoadingContext) -> None:
        self.images, self.count = images, len(images)
        self.batch_size = min(batch_size, math.ceil(self.count / context.ranks.world_size))
        self.indices = eval_places(self.count, self.batch_size, context.ranks).to(images.pixels.device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for indices in self.indices:
            usable = indices.clamp_min(0)
            places = torch.where(indices < 0, -1, self.images.places[usable])
            yield self.images.pixels[usable], self.images.targets[usable], places
