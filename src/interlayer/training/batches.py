"""Batches on the device, in an order and with draws that depend only on seed, epoch and step.

Step s of an epoch takes images s B to (s + 1) B of the epoch's order, and process r of R its r-th part of them. The
draws of an image that workers augment come from (seed, epoch, place in the epoch), those of a batch on the device from
(seed, epoch, step, process). So a run that is resumed at any step, or with another number of workers, sees the same
batches.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from timm.data import create_transform
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torchvision import transforms

from .augment import Finish, crop_and_flip
from .files import TrainingError
from .lock import close_locks
from .recipe import Recipe
from .sources import Images, Problems, Stream
from .stop import prepare_worker_signals

EVAL_PIXELS = 2**20  # of an evaluation batch at least: a thousand images of 32 pixels
RESIDENT_BYTES = 2 * 2**30  # more than this stays on the disk and goes through workers
Report = Callable[[str, int, int], None]  # what is being done, how many of how many


@dataclass(frozen=True)
class Share:
    """Which part of each batch this process takes."""

    rank: int = 0
    processes: int = 1


@dataclass(frozen=True)
class Preparation:
    """How images become the model's input.

    Args:
        size: height and width.
        mean, std: of values from 0 to 1.
        crop_pct: part of the image that evaluation's central crop keeps.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop_pct: float

    def evaluation(self) -> Any:
        """PIL image to bytes [3, size, size], as timm evaluates."""
        return create_transform(
            (3, self.size, self.size),
            is_training=False,
            use_prefetcher=True,
            interpolation=self.interpolation,
            crop_pct=self.crop_pct,
        )

    def training(self, recipe: Recipe) -> Any:
        """PIL image to bytes [3, size, size], augmented by timm; what batches do on the device is left to them."""
        cropped, coloured, as_bytes = transforms_imagenet_train(
            self.size,
            scale=tuple(recipe.crop_scale),
            ratio=tuple(recipe.crop_ratio),
            hflip=recipe.flip,
            color_jitter=recipe.color_jitter or None,
            auto_augment=recipe.auto_augment,
            interpolation=recipe.interpolation,
            mean=self.mean,
            use_prefetcher=True,
            separate=True,
        )
        if recipe.crop != "resized":
            resize = transforms.Resize(self.size, getattr(transforms.InterpolationMode, self.interpolation.upper()))
            placed = [transforms.RandomCrop(self.size, padding=recipe.padding)] if recipe.crop == "padded" else []
            flipped = transforms.RandomHorizontalFlip(recipe.flip)
            cropped = transforms.Compose([resize, transforms.CenterCrop(self.size), *placed, flipped])
        return transforms.Compose([cropped, coloured, as_bytes])


def mixed_seed(purpose: str, *parts: int) -> int:
    """One seed of several numbers, far apart for near ones and for other purposes."""
    sequence = np.random.SeedSequence([zlib.crc32(purpose.encode()), len(parts), *parts])
    return int(sequence.generate_state(1, np.uint64)[0]) % 2**63


def seed_libraries(seed: int) -> None:
    """Seed the three libraries that networks and transforms draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def epoch_order(count: int, recipe: Recipe, epoch: int) -> Tensor:
    """The order of an epoch. With repeated augmentation each image comes `repeats` times in a row, and the epoch keeps
    its length: it shows a part of the images (Hoffer et al., 2020)."""
    generator = torch.Generator().manual_seed(mixed_seed("order", recipe.seed, epoch))
    order = torch.randperm(count, generator=generator)
    if recipe.repeated_augmentation > 1:
        order = order.repeat_interleave(recipe.repeated_augmentation)[:count]
    return order


class TrainBatches:
    """What the loop needs of training data: steps of an epoch, and their batches from any step on."""

    exact_resume = True  # whether an epoch can be entered in its middle

    def __init__(self, count: int, recipe: Recipe, finish: Finish, part: Share, device: torch.device) -> None:
        self.recipe, self.finish, self.part, self.device = recipe, finish, part, device
        self.steps, self.share = _step_sizes(count, recipe, part)  # of an epoch; images that this process takes of each
        self.generator = torch.Generator(device)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Batches of an epoch, as `prepare` takes them."""
        raise NotImplementedError

    def prepare(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Images and targets on the device, augmented."""
        pixels, labels = batch
        return self.finish(pixels, labels, self.generator)

    def names(self, epoch: int, step: int) -> list[str]:
        """The images of a batch of this process, by name."""
        raise NotImplementedError

    def seed(self, epoch: int, step: int) -> None:
        """Make the draws of `prepare` those of this step."""
        self.generator.manual_seed(mixed_seed("batch", self.recipe.seed, epoch, step, self.part.rank))


class EvalBatches:
    """Batches of equal shape (the last is padded) with the number of images that count."""

    count: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Bytes [B, 3, H, W], labels [B], places in the source [B] (-1 for padding), on the device."""
        raise NotImplementedError


def _step_sizes(count: int, recipe: Recipe, share: Share) -> tuple[int, int]:
    """Steps of an epoch, and images of a step that one process takes."""
    parts = share.processes * recipe.accumulate
    if recipe.batch_size % parts:
        raise TrainingError(
            f"batch_size={recipe.batch_size} cannot be cut into {share.processes} processes x accumulate="
            f"{recipe.accumulate} equal parts"
        )
    if count < recipe.batch_size:
        raise TrainingError(
            f"batch_size={recipe.batch_size} is more than the {count} training images: give a smaller batch_size"
        )
    return count // recipe.batch_size, recipe.batch_size // share.processes


class ResidentImages:
    """A source kept on the device as bytes [N, 3, H, W]."""

    def __init__(
        self,
        images: Images,
        preparation: Preparation,
        device: torch.device,
        problems: Problems,
        report: Report = lambda *_: None,
    ) -> None:
        transform = preparation.evaluation()
        pixels = torch.empty(len(images), 3, preparation.size, preparation.size, dtype=torch.uint8)
        unusable: dict[int, str] = {}

        def load(index: int) -> None:
            try:
                pixels[index] = torch.as_tensor(np.asarray(transform(images.open(index))))
            except Exception as error:
                unusable[index] = _why(error)

        shown = time.monotonic()
        with ThreadPoolExecutor(16) as pool:
            for done, _ in enumerate(pool.map(load, range(len(images)), chunksize=64), 1):
                if time.monotonic() - shown > 0.2:
                    shown = time.monotonic()
                    report("loading images", done, len(images))
        problems.add({images.name(i): unusable[i] for i in sorted(unusable)})
        kept = np.setdiff1d(np.arange(len(images)), list(unusable))
        if not len(kept):
            raise TrainingError("none of the images can be read")
        self.source = images
        self.places = torch.as_tensor(kept).to(device)  # in the source
        self.pixels = (pixels[kept] if unusable else pixels).to(device)
        self.labels = torch.as_tensor(images.labels[kept], dtype=torch.int64).to(device)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return self.source.name(int(self.places[index]))


def _resident(
    images: Images, preparation: Preparation, device: torch.device, problems: Problems, report: Report
) -> ResidentImages:
    """The images on the device; runs of one comparison, which share their source, share them."""
    kept: dict[Any, ResidentImages] = images.__dict__.setdefault("resident", {})
    key = preparation, str(device)
    if key not in kept:
        kept[key] = ResidentImages(images, preparation, device, problems, report)
    return kept[key]


def can_be_resident(images: Images | Stream, recipe: Recipe, size: int) -> str:
    """Why the images cannot be kept on the device and augmented there; empty if they can."""
    if isinstance(images, Stream):
        return "they are a stream"
    if recipe.crop == "resized":
        return "crop: resized is done by workers"
    if recipe.auto_augment or recipe.color_jitter:
        return "auto_augment and color_jitter are done by workers"
    total = len(images) * 3 * size * size
    return f"they take {total / 2**30:.1f} GiB" if total > RESIDENT_BYTES else ""


class ResidentTrainBatches(TrainBatches):
    """Batches gathered and augmented on the device: a batch is the indices of its images."""

    def __init__(self, images: ResidentImages, recipe: Recipe, finish: Finish, share: Share) -> None:
        super().__init__(len(images), recipe, finish, share, images.pixels.device)
        self.images = images

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        order = epoch_order(len(self.images), self.recipe, epoch)[: self.steps * self.recipe.batch_size]
        mine = order.view(self.steps, self.part.processes, self.share)[:, self.part.rank]
        if self.device.type == "cuda":
            mine = mine.pin_memory().to(self.device, non_blocking=True)
        yield from mine[start:]

    def prepare(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        padding = self.recipe.padding if self.recipe.crop == "padded" else 0
        pixels = crop_and_flip(self.images.pixels[batch], padding, self.recipe.flip, self.generator)
        return self.finish(pixels, self.images.labels[batch], self.generator)

    def names(self, epoch: int, step: int) -> list[str]:
        order = epoch_order(len(self.images), self.recipe, epoch)
        first = step * self.recipe.batch_size + self.part.rank * self.share
        return [self.images.name(int(i)) for i in order[first : first + self.share]]


class ResidentEvalBatches(EvalBatches):
    def __init__(self, images: ResidentImages, batch_size: int, share: Share) -> None:
        self.images, self.count = images, len(images)
        self.batch_size = min(batch_size, math.ceil(self.count / share.processes))
        self.indices = _eval_places(self.count, self.batch_size, share).to(images.pixels.device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for indices in self.indices:
            usable = indices.clamp_min(0)
            places = torch.where(indices < 0, -1, self.images.places[usable])
            yield self.images.pixels[usable], self.images.labels[usable], places


def _eval_places(count: int, batch_size: int, share: Share) -> Tensor:
    """[steps, batch_size]: which images this process evaluates, -1 where a batch is filled up."""
    mine = torch.arange(share.rank, count, share.processes)
    steps = math.ceil(math.ceil(count / share.processes) / batch_size)
    filled = torch.full((steps * batch_size,), -1, dtype=torch.int64)
    filled[: len(mine)] = mine
    return filled.view(steps, batch_size)


@dataclass
class _Unusable:
    """Stands in a batch for an image that could not be read: an exception would arrive as a worker's traceback."""

    name: str
    reason: str


def _why(error: Exception) -> str:
    return f"it cannot be read as an image ({' '.join(str(error).split())[:120] or type(error).__name__})"


class _LoadedImages(Dataset):
    """Images by (place in the epoch, index), each with draws of its own."""

    def __init__(self, images: Images, transform: Any) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        draws, index = key
        if index < 0:  # fills up the last batch of an evaluation
            return None
        try:
            image = self.images.open(index)
            with _own_draws(draws):
                pixels = torch.as_tensor(np.asarray(self.transform(image)))
        except Exception as error:
            return _Unusable(self.images.name(index), _why(error))
        return pixels, int(self.images.labels[index]), index


@contextmanager
def _own_draws(seed: int) -> Iterator[None]:
    """Random numbers from `seed` inside the `with` block, for the three libraries that transforms draw from."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_libraries(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


class _Places(Sampler):
    """Batches of (draws, index) of one epoch from a step on. `epoch` is set before each pass."""

    def __init__(self, images: Images, recipe: Recipe, steps: int, share: int, part: Share) -> None:
        self.count, self.recipe, self.steps, self.share, self.part = len(images), recipe, steps, share, part
        self.epoch = self.start = 0

    def indices(self, step: int, order: Tensor) -> list[tuple[int, int]]:
        first = step * self.recipe.batch_size + self.part.rank * self.share
        return [
            (mixed_seed("image", self.recipe.seed, self.epoch, place), int(order[place]))
            for place in range(first, first + self.share)
        ]

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = epoch_order(self.count, self.recipe, self.epoch)
        for step in range(self.start, self.steps):
            yield self.indices(step, order)


def _collate(samples: list[Any]) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[_Unusable]]:
    """Pixels, labels and places of the images that can be used, and those that cannot."""
    usable = [s for s in samples if s is not None and not isinstance(s, _Unusable)]
    unusable = [s for s in samples if isinstance(s, _Unusable)]
    if not usable:
        return None, None, None, unusable
    pixels, labels, places = zip(*usable, strict=True)
    return torch.stack(pixels), torch.tensor(labels), torch.tensor(places), unusable


class _FilledCollate:
    """The same with zeros, at place -1, for what is missing: in evaluation, processes must take equal steps."""

    def __init__(self, size: int) -> None:
        self.blank = torch.zeros(3, size, size, dtype=torch.uint8), 0, -1

    def __call__(self, samples: list[Any]) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[_Unusable]]:
        unusable = [s for s in samples if isinstance(s, _Unusable)]
        whole = [self.blank if s is None or isinstance(s, _Unusable) else s for s in samples]
        pixels, labels, places, _ = _collate(whole)
        return pixels, labels, places, unusable


def _start_worker(worker: int) -> None:
    torch.set_num_threads(1)
    close_locks()  # a worker outlives a killed run for seconds, and would hold its folder
    prepare_worker_signals()


def _loader(dataset: Any, workers: int, device: torch.device, seed: int = 0, **options: Any) -> DataLoader:
    return DataLoader(
        dataset,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        persistent_workers=False,
        worker_init_fn=_start_worker,
        generator=torch.Generator().manual_seed(seed),  # or it would draw from the model's random numbers
        **options,
    )


class LoadedTrainBatches(TrainBatches):
    """Batches that worker processes load and augment one image at a time; erasing and mixing follow on the device."""

    def __init__(
        self,
        images: Images,
        recipe: Recipe,
        preparation: Preparation,
        finish: Finish,
        share: Share,
        device: torch.device,
        problems: Problems,
    ) -> None:
        super().__init__(len(images), recipe, finish, share, device)
        self.images, self.problems = images, problems
        self.sampler = _Places(images, recipe, self.steps, self.share, share)
        dataset = _LoadedImages(images, preparation.training(recipe))
        self.loader = _loader(dataset, recipe.workers, device, batch_sampler=self.sampler, collate_fn=_collate)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        self.sampler.epoch, self.sampler.start = epoch, start
        for pixels, labels, _, unusable in self.loader:
            self.problems.add({bad.name: bad.reason for bad in unusable})
            if pixels is None:
                raise TrainingError(f"no image of a batch can be read; the first is {unusable[0].name}")
            yield pixels.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def names(self, epoch: int, step: int) -> list[str]:
        self.sampler.epoch = epoch
        order = epoch_order(len(self.images), self.recipe, epoch)
        return [self.images.name(index) for _, index in self.sampler.indices(step, order)]


class LoadedEvalBatches(EvalBatches):
    def __init__(
        self,
        images: Images,
        preparation: Preparation,
        batch_size: int,
        workers: int,
        share: Share,
        device: torch.device,
        problems: Problems,
    ) -> None:
        self.count, self.device, self.problems = len(images), device, problems
        places = _eval_places(self.count, batch_size, share)
        keys = [[(0, int(place)) for place in batch] for batch in places]
        dataset = _LoadedImages(images, preparation.evaluation())
        collate = _FilledCollate(preparation.size)
        self.loader = _loader(dataset, workers, device, batch_sampler=keys, collate_fn=collate)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for pixels, labels, places, unusable in self.loader:
            self.problems.add({bad.name: bad.reason for bad in unusable})
            yield tuple(t.to(self.device, non_blocking=True) for t in (pixels, labels, places))  # type: ignore[misc]


class _StreamedImages(IterableDataset):
    """A stream's images, transformed; one that cannot be read becomes an `_Unusable` where timm passes it over."""

    def __init__(self, stream: Stream, transform: Any, classes: int) -> None:
        self.stream, self.transform, self.classes = stream, transform, classes

    def __iter__(self) -> Iterator[Any]:
        failures: list[_Unusable] = []
        with self._noticing(failures):
            for number, (image, label) in enumerate(self._samples()):
                while failures:
                    yield failures.pop()
                name = f"image {number} of {self.stream.name} {self.stream.split}"
                if image is None or not 0 <= int(label) < self.classes:
                    yield _Unusable(name, label if image is None else self._outside(label))
                    continue
                try:
                    yield torch.as_tensor(np.asarray(self.transform(image.convert("RGB")))), int(label), 0
                except Exception as error:
                    yield _Unusable(name, _why(error))
            while failures:
                yield failures.pop()

    def _samples(self) -> Iterator[tuple[Any, Any]]:
        """The reader's images and labels; an error that ends the reader comes as (None, reason)."""
        samples = iter(self.stream.reader)
        while True:
            try:
                yield next(samples)
            except StopIteration:
                return
            except Exception as error:
                yield None, _why(error)
                return

    def _outside(self, label: Any) -> str:
        return f"its label {label} is outside 0 to {self.classes - 1}"

    @contextmanager
    def _noticing(self, failures: list[_Unusable]) -> Iterator[None]:
        """timm's WebDataset reader logs what it cannot decode and goes on; note it with its name instead."""
        if self.stream.kind != "wds":
            yield
            return
        from timm.data.readers import reader_wds

        def decode(sample: Any, *args: Any, decode: Any = reader_wds._decode, **kwargs: Any) -> Any:
            name = f"{sample.get('__url__', '')}:{sample.get('__key__', '')}"
            try:
                decoded = decode(sample, *args, **kwargs)
            except Exception as error:
                raise ValueError(name, _why(error)) from error
            if not 0 <= int(decoded["cls"]) < self.classes:
                raise ValueError(name, self._outside(decoded["cls"]))
            return decoded

        def note(error: Exception) -> bool:
            named = len(error.args) == 2 and isinstance(error, ValueError)
            name, why = error.args if named else (f"a shard of {self.stream.name} ({error})", _why(error))
            failures.append(_Unusable(str(name), str(why)))
            return True

        with mock.patch.multiple(reader_wds, _decode=decode, log_and_continue=note):
            self.stream.reader.ds = None  # so that the pipeline is built anew, with these two in it
            yield


class StreamTrainBatches(TrainBatches):
    """Batches of shards in timm's order. A resumed run starts its epoch again: a stream has no place to go back to."""

    exact_resume = False

    def __init__(
        self, stream: Stream, recipe: Recipe, preparation: Preparation, finish: Finish, share: Share,
        device: torch.device, problems: Problems,
    ) -> None:  # fmt: skip
        if recipe.repeated_augmentation > 1:
            raise TrainingError(
                f"repeated_augmentation={recipe.repeated_augmentation} needs images that can be read in any order, and "
                f"{stream.name} is a stream: set repeated_augmentation=1"
            )
        super().__init__(len(stream), recipe, finish, share, device)
        self.stream, self.problems = stream, problems
        dataset = _StreamedImages(stream, preparation.training(recipe), finish.classes)
        if hasattr(stream.reader, "set_loader_cfg"):
            stream.reader.set_loader_cfg(num_workers=max(1, recipe.workers))
        self.loader = _loader(
            dataset, recipe.workers, device, batch_size=self.share, collate_fn=_collate, drop_last=True,
            seed=mixed_seed("workers", recipe.seed, share.rank),
        )  # fmt: skip

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        if hasattr(self.stream.reader, "set_epoch"):
            self.stream.reader.set_epoch(epoch)
        batches = iter(self.loader)
        for step in range(self.steps):
            try:
                pixels, labels, _, unusable = next(batches)
            except StopIteration:  # bad images made the stream shorter than announced: begin it again
                batches = iter(self.loader)
                pixels, labels, _, unusable = next(batches, (None, None, None, []))
            self.problems.add({bad.name: bad.reason for bad in unusable})
            if pixels is None:
                raise TrainingError(
                    f"{self.stream.name} {self.stream.split} gives process {self.part.rank} no images at step {step}: "
                    f"it needs at least as many shards as processes x workers, and images that can be read"
                )
            yield pixels.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def names(self, epoch: int, step: int) -> list[str]:
        return [f"{self.stream.name} ({self.stream.split})"]


class StreamEvalBatches(EvalBatches):
    """Every process reads the whole stream and takes its share of each batch, so that all take equal steps."""

    def __init__(
        self, stream: Stream, preparation: Preparation, batch_size: int, classes: int, workers: int, share: Share,
        device: torch.device, problems: Problems,
    ) -> None:  # fmt: skip
        self.count, self.device, self.problems, self.part = len(stream), device, problems, share
        dataset = _StreamedImages(stream, preparation.evaluation(), classes)
        whole = batch_size * share.processes
        self.loader = _loader(dataset, min(workers, 1), device, batch_size=whole, collate_fn=_collate)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        first = 0
        for pixels, labels, _, unusable in self.loader:
            self.problems.add({bad.name: bad.reason for bad in unusable})
            if pixels is None:
                continue
            mine = _eval_places(len(labels), math.ceil(len(labels) / self.part.processes), self.part)[0]
            usable = mine.clamp_min(0)
            places = torch.where(mine < 0, -1, first + mine)
            first += len(labels)
            yield tuple(t.to(self.device, non_blocking=True) for t in (pixels[usable], labels[usable], places))  # type: ignore[misc]


def train_batches(
    images: Images | Stream, recipe: Recipe, preparation: Preparation, finish: Finish, share: Share,
    device: torch.device, problems: Problems, report: Report = lambda *_: None,
) -> TrainBatches:  # fmt: skip
    """Training batches of a source, in the way that suits source and recipe."""
    why_not = can_be_resident(images, recipe, preparation.size)
    if recipe.resident == "yes" and why_not:
        raise TrainingError(f"resident=yes: the images cannot be kept on the device, {why_not}")
    if isinstance(images, Stream):
        return StreamTrainBatches(images, recipe, preparation, finish, share, device, problems)
    if recipe.resident != "no" and not why_not:
        whole = dataclasses.replace(preparation, crop_pct=1.0)  # training crops for itself
        return ResidentTrainBatches(_resident(images, whole, device, problems, report), recipe, finish, share)
    return LoadedTrainBatches(images, recipe, preparation, finish, share, device, problems)


def eval_batches(
    images: Images | Stream, recipe: Recipe, preparation: Preparation, classes: int, share: Share,
    device: torch.device, problems: Problems, report: Report = lambda *_: None,
) -> EvalBatches:  # fmt: skip
    """Evaluation batches of a source."""
    mine = recipe.batch_size // (share.processes * recipe.accumulate)
    batch_size = recipe.eval_batch_size or max(1, mine, EVAL_PIXELS // preparation.size**2)
    if isinstance(images, Stream):
        return StreamEvalBatches(images, preparation, batch_size, classes, recipe.workers, share, device, problems)
    if recipe.resident != "no" and len(images) * 3 * preparation.size**2 <= RESIDENT_BYTES // 4:
        return ResidentEvalBatches(_resident(images, preparation, device, problems, report), batch_size, share)
    return LoadedEvalBatches(images, preparation, batch_size, recipe.workers, share, device, problems)


__all__ = ["EvalBatches", "Preparation", "Share", "TrainBatches", "eval_batches", "train_batches"]
