"""What the networks of a comparison cost: parameters, multiply-adds, memory, and the time of an epoch."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..analysis import Setting, count_flops, count_parameters, measure_memory
from ..models.build import check_size
from ..tasks import Task
from ..training import Recipe, TrainingError
from ..training.data import Data, ImageTransform, open_batches
from ..training.logs import read_metrics
from ..training.memory import explaining_out_of_memory, smaller_batch_advice
from ..training.processes import Processes
from ..training.setup import TrainingSetup, available_workers, build_network, set_up
from ..training.step import WARMUP_STEPS, TrainStep
from .trained import task_of

TIMED_STEPS = 12  # of each network, for the time of an epoch; more if there are as many workers, see below
ENOUGH_SECONDS = 30.0  # of timed steps; a detector on a CPU would otherwise take minutes
UNTIMED_STEPS = {"cuda": WARMUP_STEPS + 2, "cpu": 2}  # before them: compilation, and the capture of a CUDA graph


class StaticCost(NamedTuple):
    """What a network costs independently of its training.

    Args:
        parameters: number of parameters.
        flops: multiply-adds per image.
        memory: peak memory of a training step in bytes.
    """

    parameters: int
    flops: int
    memory: int


@dataclass(frozen=True)
class NetworkCost:
    """The cost of a network under the recipe.

    Args:
        parameters: number of parameters.
        flops: multiply-adds per image.
        memory: peak memory of a training step in bytes.
        epoch_seconds: training time of an epoch: the median over the runs, without their first epochs, or if runs
            shared the device, that of a few steps, measured alone before the runs.
        epochs: number of epochs.
    """

    parameters: int
    flops: int
    memory: int
    epoch_seconds: float
    epochs: int = 0

    @property
    def training_seconds(self) -> float:
        """Training time of a run, without evaluation."""
        return self.epochs * self.epoch_seconds


class _LossOf(nn.Module):
    """A network that computes the loss of its task on made-up targets."""

    def __init__(self, task: Task, network: nn.Module) -> None:
        super().__init__()
        self.task, self.network = task, network

    def forward(self, images: Tensor) -> Any:
        targets = self.task.example_targets(images)
        return self.task.loss(self.task.forward(self.network, images, targets), targets)[0]


def static_cost(recipe: Recipe, classes: Sequence[str], processes: Processes) -> StaticCost:
    """Measures a network before it is trained."""
    device = processes.device
    task = task_of(recipe, classes)
    network = build_network(task)
    if task.annotations == "labels":
        check_size(network, recipe.model, ImageTransform.of(network, recipe).size)
    else:
        network.to(device)  # images are too large to be counted on the CPU
    flops = count_flops(network, task.image_size, convention="torch")
    parameters = count_parameters(network)
    precision: Any = {"tf32": "float32"}.get(recipe.precision, recipe.precision)
    images = max(1, recipe.batch_size // (recipe.accumulate * processes.world_size))
    setting = Setting(images, task.image_size, device.type, precision, recipe.channels_last)
    try:
        memory = measure_memory(network if task.annotations == "labels" else _LossOf(task, network), setting)
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"the GPU's memory does not hold a training step of {recipe.model} with {images} images: "
            f"{smaller_batch_advice(recipe)}"
        ) from error
    if device.type == "cuda":
        del network
        torch.cuda.empty_cache()
    return StaticCost(parameters, flops, memory)


def measured_epoch_seconds(recipe: Recipe, data: Data, processes: Processes) -> float:
    """Returns the training time of an epoch, estimated from a few steps of a run that is then discarded.

    The time includes loading and augmentation. Every rank must call this; all ranks return the time of rank 0.
    """
    with explaining_out_of_memory(recipe):
        setup = set_up(recipe, processes, data)
        # Where loading takes longest, the batches of all workers come together: one step waits, and the others do not.
        bursts = max(1, available_workers(recipe.workers))
        most = math.ceil(TIMED_STEPS / bursts) * bursts
        device, alone = setup.device.type, processes.world_size == 1  # all ranks take as many steps
        timed: list[float] = []
        with closing(_timed_steps(setup, prepares_sizes=device == "cuda")) as steps:
            for seconds in itertools.islice(steps, UNTIMED_STEPS[device], None):
                timed.append(seconds)
                enough = alone and len(timed) % bursts == 0 and sum(timed) >= ENOUGH_SECONDS
                if enough or len(timed) == most:
                    break
    return float(processes.broadcast(statistics.fmean(timed) * setup.batches.steps))


def _timed_steps(setup: TrainingSetup, *, prepares_sizes: bool) -> Generator[float]:
    """Trains, epoch after epoch, and yields the seconds of every step.

    Args:
        prepares_sizes: whether a batch of a new size is trained on twice, of which the second time counts, because
            cuDNN prepares its convolutions in the first.
    """
    stream = torch.cuda.Stream() if setup.device.type == "cuda" else None
    step = TrainStep(setup, stream)
    sizes: set[tuple[int, ...]] = set()

    def run(batch: Any) -> None:
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            step.run(batch)
        if stream is not None:
            torch.cuda.synchronize()

    setup.train()
    try:
        for epoch in itertools.count():
            with open_batches(setup.batches.epoch(epoch, 0)) as batches:
                for index in range(setup.batches.steps):
                    began = time.perf_counter()
                    setup.set_lr(epoch, index)
                    setup.batches.seed(epoch, index)
                    batch = next(batches)
                    loading = time.perf_counter() - began
                    size = batch[0].shape  # of the loaded images; images on the device have one size
                    if prepares_sizes and size not in sizes:
                        sizes.add(size)
                        run(batch)
                    began = time.perf_counter()
                    run(batch)
                    yield loading + time.perf_counter() - began
    finally:
        step.release()
        setup.batches.close()


def median_epoch_seconds(folders: Sequence[Path]) -> float:
    """Returns the median training time of the epochs of finished runs, without their first epochs."""
    seconds = []
    for folder in folders:
        rows = [row["seconds"] for row in read_metrics(folder)]
        seconds += rows[1:] if len(rows) > 1 else rows
    return statistics.median(seconds)


def equal_time_epochs(epochs: int, seconds: Mapping[str, float], known: Mapping[str, int] = {}) -> dict[str, int]:
    """Returns the epochs of each network that fit into the time in which the slowest one trains ``epochs`` epochs.

    Args:
        seconds: the time of an epoch of each network.
        known: the epochs of networks that have been trained already. Other networks get the time of these.

    >>> equal_time_epochs(10, {"plain": 1.0, "attached": 1.38})
    {'plain': 13, 'attached': 10}
    """
    total = max((number * seconds[name] for name, number in known.items()), default=epochs * max(seconds.values()))
    return {name: known.get(name) or max(1, int(total / each + 1e-9)) for name, each in seconds.items()}
