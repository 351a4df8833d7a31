"""Streams, which are shards that timm's readers read sequentially, and their batches.

A resumed run restarts its epoch, because a stream cannot be entered at a given step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ..files import TrainingError
from ..recipe import Recipe
from .base import EvalBatches, TrainBatches, eval_places
from .context import LoadingContext
from .images import Unusable, as_rgb, label_outside, unreadable
from .seeds import mixed_seed
from .workers import Collate, make_loader

PACKAGES = {"wds": "webdataset", "tfds": "tensorflow_datasets", "hfids": "datasets"}


class Stream:
    """Shards that timm's readers read sequentially: WebDataset, TFDS and streamed Hugging Face datasets.

    Args:
        name: wds/..., tfds/... or hfids/...
        root: the folder of the shards.
        split: name of the split. For WebDataset, it can also be a brace pattern of shards with the number of images,
            such as train-{0000..0007}.tar|8000.
        training: whether shards and images are shuffled.
        recipe: batch size, seed, number of classes and options of the reader.
    """

    def __init__(self, name: str, root: str, split: str, *, training: bool, recipe: Recipe) -> None:
        self.name, self.split = name, split
        self.classes: list[str] = [str(i) for i in range(recipe.num_classes or 0)]
        package = PACKAGES[name.split("/")[0]]
        try:
            import_module(package)
        except ImportError as error:
            raise TrainingError(f"{name} needs {package}: pip install {package.replace('_', '-')}") from error
        try:
            self.reader = self._open(root, training, recipe)
        except Exception as error:
            raise TrainingError(f"{name}, split {split!r}, cannot be opened: {' '.join(str(error).split())}") from error
        if not training:  # each rank reads the complete split and uses its slice of the batches
            for attribute, value in (("dist_rank", 0), ("dist_num_replicas", 1)):
                if hasattr(self.reader, attribute):
                    setattr(self.reader, attribute, value)
        if not self.classes:
            raise TrainingError(f"{name} is a stream, which does not tell its classes: give num_classes=N")

    def _open(self, root: str, training: bool, recipe: Recipe) -> Any:
        options = {key: value for key, value in recipe.data_options.items() if not key.endswith("_split")}
        options |= {"is_training": training, "batch_size": recipe.batch_size, "seed": recipe.seed}
        if self.name.startswith("wds/"):
            from .webdataset import ReportingReader

            options.pop("download", None)
            return ReportingReader(
                root=root, split=self.split, stream_name=self.name, classes=len(self.classes), **options
            )
        from timm.data.readers import create_reader

        if self.name.startswith("hfids/"):
            options.setdefault("input_img_mode", "")  # `as_rgb` converts the images
        return create_reader(self.name, root, self.split, **options)

    def __len__(self) -> int:
        return int(self.reader.num_samples)

    def samples(self) -> Iterator[tuple[Any, Any] | Unusable]:
        """Yields pairs of image and label, and an `Unusable` for each image that the reader could not read."""
        samples = iter(self.reader)
        failures: list[Unusable] = getattr(self.reader, "failures", [])
        number = 0
        while True:
            try:
                sample = next(samples, None)
            except Exception as error:  # the reader cannot continue after an error
                yield from _drain(failures)
                yield Unusable(self.image_name(number), unreadable(error))
                return
            yield from _drain(failures)
            if sample is None:
                return
            yield sample
            number += 1

    def image_name(self, number: int) -> str:
        """Returns a name for an image of the stream, which has none of its own."""
        return f"image {number} of {self.name} {self.split}"


def _drain(failures: list[Unusable]) -> Iterator[Unusable]:
    """Removes all failures from the list and yields them."""
    while failures:
        yield failures.pop()


class StreamedImages(IterableDataset):
    """The transformed images of a stream. An image that cannot be used is replaced by an `Unusable`."""

    def __init__(self, stream: Stream, transform: Callable[[Any], Any]) -> None:
        self.stream, self.transform = stream, transform

    def __iter__(self) -> Iterator[Any]:
        classes, number = len(self.stream.classes), 0
        for sample in self.stream.samples():
            if isinstance(sample, Unusable):
                yield sample
                continue
            image, label = sample
            name, number = self.stream.image_name(number), number + 1
            if not 0 <= int(label) < classes:
                yield Unusable(name, label_outside(label, classes))
                continue
            try:
                yield torch.as_tensor(np.asarray(self.transform(as_rgb(image)))), int(label), 0
            except Exception as error:
                yield Unusable(name, unreadable(error))


class StreamTrainBatches(TrainBatches):
    """Training batches of a stream, in the order of timm's reader."""

    exact_resume = False

    def __init__(self, stream: Stream, context: LoadingContext) -> None:
        recipe = context.recipe
        if recipe.repeated_augmentation > 1:
            raise TrainingError(
                f"repeated_augmentation={recipe.repeated_augmentation} needs images that can be read in any order, and "
                f"{stream.name} is a stream: set repeated_augmentation=1"
            )
        super().__init__(len(stream), context)
        self.stream, self.problems = stream, context.problems
        dataset = StreamedImages(stream, context.transform.training(recipe))
        if hasattr(stream.reader, "set_loader_cfg"):
            stream.reader.set_loader_cfg(num_workers=max(1, recipe.workers))
        self.loader = make_loader(
            dataset, recipe.workers, self.device, batch_size=self.images_per_rank, collate_fn=Collate(context.task),
            drop_last=True, seed=mixed_seed("workers", recipe.seed, self.ranks.rank),
        )  # fmt: skip

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        if hasattr(self.stream.reader, "set_epoch"):
            self.stream.reader.set_epoch(epoch)
        batches = iter(self.loader)
        for step in range(self.steps):
            try:
                pixels, targets, _, unusable = next(batches)
            except StopIteration:  # the stream is shorter than announced because of bad images: restart it
                batches = iter(self.loader)
                pixels, targets, _, unusable = next(batches, (None, None, None, []))
            self.problems.add_unusable(unusable)
            if pixels is None:
                raise TrainingError(
                    f"{self.stream.name} {self.stream.split} gives process {self.ranks.rank} no images at step {step}: "
                    f"it needs at least as many shards as processes x workers, and images that can be read"
                )
            yield pixels.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    def names(self, epoch: int, step: int) -> list[str]:
        return [f"{self.stream.name} ({self.stream.split})"]


class StreamEvalBatches(EvalBatches):
    """Evaluation batches of a stream. Every rank reads the complete stream and uses its slice of each batch."""

    def __init__(self, stream: Stream, batch_size: int, context: LoadingContext) -> None:
        self.count, self.device, self.problems = len(stream), context.device, context.problems
        self.ranks = context.ranks
        dataset = StreamedImages(stream, context.transform.evaluation())
        workers, images = min(context.recipe.workers, 1), batch_size * self.ranks.world_size
        self.loader = make_loader(dataset, workers, self.device, batch_size=images, collate_fn=Collate(context.task))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        first = 0
        for pixels, targets, _, unusable in self.loader:
            self.problems.add_unusable(unusable)
            if pixels is None:
                continue
            mine = eval_places(len(targets), math.ceil(len(targets) / self.ranks.world_size), self.ranks)[0]
            usable = mine.clamp_min(0)
            places = torch.where(mine < 0, -1, first + mine)
            first += len(targets)
            yield tuple(t.to(self.device, non_blocking=True) for t in (pixels[usable], targets[usable], places))  # type: ignore[misc]
