"""Batches that worker processes load and augment image by image. Erasing and mixing follow on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ...tasks import Task
from ..files import TrainingError
from ..lock import close_locks
from ..stop import prepare_worker_signals
from .base import EvalBatches, TrainBatches, eval_places
from .context import LoadingContext
from .images import Images, Unusable, unreadable
from .joint_transforms import JointTransform, LoadedSamples
from .sampling import make_sampler
from .seeds import temporary_seed

PADDING_SIZE = 32  # height and width of an image that fills a batch, if images have different sizes
Collated = tuple[Tensor | None, Tensor | None, Tensor | None, list[Unusable]]


class LoadedImages(Dataset):
    """A dataset indexed by (seed of the augmentation, index of the image). Index -1 is padding and returns None."""

    def __init__(self, images: Images, transform: Callable[[Any], Any]) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        seed, index = key
        if index < 0:
            return None
        try:
            image = self.images.open(index)
            with temporary_seed(seed):
                pixels = torch.as_tensor(np.asarray(self.transform(image)))
        except Exception as error:
            return Unusable(self.images.name(index), unreadable(error))
        return pixels, self.images.target(index), index


def load_images(images: Images, context: LoadingContext, *, training: bool) -> Dataset:
    """Returns the dataset that workers load: images with a label, or with boxes and masks that are transformed too."""
    transform, recipe = context.transform, context.recipe
    if context.task.annotations != "labels":
        return LoadedSamples(images, JointTransform.of(recipe, context.task).training() if training else None)
    return LoadedImages(images, transform.training(recipe) if training else transform.evaluation())


@dataclass(frozen=True)
class Collate:
    """Collates samples (pixels, target, index) and separates the images that cannot be used.

    Args:
        task: collates pixels and targets.
        padding: a sample that replaces each missing one, because all ranks must take the same number of evaluation
            steps. If None, missing samples are left out.
    """

    task: Task
    padding: tuple[Tensor, Any, int] | None = None

    def __call__(self, samples: Sequence[Any]) -> Collated:
        """Returns pixels, targets and indices, or None for each if no image can be used, and the unusable images."""
        unusable = [sample for sample in samples if isinstance(sample, Unusable)]
        filled = [self.padding if sample is None or isinstance(sample, Unusable) else sample for sample in samples]
        usable = [sample for sample in filled if sample is not None]
        if not usable:
            return None, None, None, unusable
        pixels, targets = self.task.collate([(image, target) for image, target, _ in usable])
        return pixels, targets, torch.tensor([place for _, _, place in usable]), unusable


def make_loader(dataset: Any, workers: int, device: torch.device, *, seed: int = 0, **options: Any) -> DataLoader:
    """Returns a `DataLoader` that does not draw from the global random number generator."""
    return DataLoader(
        dataset,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        persistent_workers=False,
        worker_init_fn=_start_worker,
        generator=torch.Generator().manual_seed(seed),  # by default, it would draw from the global one
        **options,
    )


def _start_worker(worker: int) -> None:
    torch.set_num_threads(1)
    close_locks()  # a worker survives a killed run for seconds and would keep its folder locked
    prepare_worker_signals()


class LoadedTrainBatches(TrainBatches):
    """Training batches that worker processes load and augment.

    The workers are started once and load the first batches of an epoch during the evaluation before it. Every epoch
    would otherwise begin by starting them, which takes eight of them about a second.
    """

    def __init__(self, images: Images, context: LoadingContext) -> None:
        super().__init__(len(images), context)
        self.images, self.problems = images, context.problems
        self.sampler = make_sampler(images, self)
        dataset = load_images(images, context, training=True)
        collate = Collate(context.task)
        self.loader = make_loader(
            dataset, self.recipe.workers, self.device, batch_sampler=self.sampler, collate_fn=collate
        )
        self._loading: Any = None  # the loader's iterator, which holds the workers
        self._follows = (0, 0)  # the epoch and step of its next batch

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        goes_on = self._follows == (epoch, start) and epoch < self.recipe.epochs
        if self._loading is None or not goes_on:
            self.close()
            self.sampler.begin = self._follows = epoch, start
            self._loading = iter(self.loader)
        for step in range(start, self.steps):
            pixels, targets, _, unusable = next(self._loading)
            self._follows = divmod(epoch * self.steps + step + 1, self.steps)
            self.problems.add_unusable(unusable)
            if pixels is None:
                raise TrainingError(f"no image of a batch can be read; the first is {unusable[0].name}")
            yield pixels.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    def names(self, epoch: int, step: int) -> list[str]:
        return [self.images.name(index) for _, index in self.sampler.indices(epoch, step)]

    def close(self) -> None:
        loading, self._loading = self._loading, None
        if hasattr(loading, "_shutdown_workers"):  # at once: the traceback of an exception can hold the iterator
            loading._shutdown_workers()


class LoadedEvalBatches(EvalBatches):
    """Evaluation batches that worker processes load.

    Args:
        workers: the number of worker processes; the recipe's if None.
    """

    def __init__(self, images: Images, batch_size: int, context: LoadingContext, *, workers: int | None = None) -> None:
        self.count, self.device, self.problems = len(images), context.device, context.problems
        places = eval_places(self.count, batch_size, context.ranks)
        keys = [[(0, int(place)) for place in batch] for batch in places]
        dataset = load_images(images, context, training=False)
        workers = context.recipe.workers if workers is None else workers
        has_labels = context.task.annotations == "labels"
        size = context.transform.size if has_labels else PADDING_SIZE
        target = images.target(0) if self.count and has_labels else None  # the target of padding, which is ignored
        padding = torch.zeros(3, size, size, dtype=torch.uint8), target, -1
        collate = Collate(context.task, padding)
        self.loader = make_loader(dataset, workers, self.device, batch_sampler=keys, collate_fn=collate)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for pixels, targets, places, unusable in self.loader:
            self.problems.add_unusable(unusable)
            yield tuple(t.to(self.device, non_blocking=True) for t in (pixels, targets, places))  # type: ignore[misc]
