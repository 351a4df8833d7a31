"""One training step, eager or captured as a CUDA graph, and the sums of an epoch.

A step never waits for the device. The loss, the task's named scalars and the first step with a loss that is not finite
are accumulated on the device. They are read when progress is shown, and always before a checkpoint is written. On one
GPU with resident images, augmentation, forward and backward pass are captured into one CUDA graph and replayed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..hosts.finding.probe import reason
from .data.resident import ResidentTrainBatches
from .files import TrainingError
from .processes import Processes
from .setup import TrainingSetup
from .stop import AGREE_STEPS

WARMUP_STEPS = 3  # eager steps before a CUDA graph is captured
PEEK_SECONDS = 0.25  # between two asynchronous reads of the sums on the device


@dataclass(frozen=True)
class Totals:
    """Sums of an epoch so far, over all ranks, as last read.

    Args:
        loss: sum of the loss over images.
        scalars: sums of the task's named scalars over images.
        images: number of images.
        first_bad_step: the first step with a loss that was not finite; -1 if there was none.
    """

    loss: float
    scalars: Mapping[str, float]
    images: float
    first_bad_step: int

    @property
    def mean_loss(self) -> float:
        return self.loss / self.images if self.images else math.nan

    @property
    def means(self) -> dict[str, float]:
        return {name: total / self.images if self.images else math.nan for name, total in self.scalars.items()}


class EpochSums:
    """Sums of an epoch on the device.

    Args:
        names: names of the task's scalars.
        processes: the ranks that train together.

    Attributes:
        values: float64 [loss, named scalars..., images, first step with a loss that was not finite, or -1].
        step: the current step, on the device.
        totals: the sums as last read.
    """

    def __init__(self, names: Sequence[str], processes: Processes) -> None:
        self.names, self.processes = list(names), processes
        self.values = torch.zeros(len(self.names) + 3, dtype=torch.float64, device=processes.device)
        self.step = torch.zeros((), dtype=torch.int64, device=processes.device)
        self.restart(0)
        self.totals = self._totals([0.0] * (len(self.values) - 1) + [-1.0])
        self._read_at = time.perf_counter()
        self._peeked: tuple[Tensor, torch.cuda.Event] | None = None  # an asynchronous copy from the GPU

    def restart(self, step: int) -> None:
        """Resets the sums for an epoch that starts at this step."""
        self.values[:-1].zero_()
        self.values[-1:].fill_(-1)
        self.step.fill_(step)
        self._read_at = time.perf_counter()

    def add(self, loss: Tensor, scalars: Mapping[str, Tensor], count: int) -> None:
        """Adds the mean loss and the summed named scalars of a batch of ``count`` images."""
        totals = [scalars[name].double() for name in self.names]
        images = torch.full_like(self.step, count).double()
        self.values[:-1] += torch.stack([loss.double() * count, *totals, images])
        first = (~torch.isfinite(loss)) & (self.values[-1] < 0)
        self.values[-1] = torch.where(first, self.step.double(), self.values[-1])

    def must_read(self, step: int) -> bool:
        """Whether to read the sums at this step: always on a CPU, and at a fixed interval with several ranks."""
        if self.processes.world_size > 1:
            return step % AGREE_STEPS == 0
        return self.processes.device.type == "cpu"

    def read(self) -> Totals:
        """Waits for the device and reads the sums of all ranks; every rank must call this."""
        if self.processes.world_size > 1:
            gathered = self.processes.gather(self.values[None])
            seen = gathered[:, -1][gathered[:, -1] >= 0]  # a bad loss spreads to other ranks one step later
            first_bad = float(seen.min()) if len(seen) else -1.0
            self.totals = self._totals([*gathered[:, :-1].sum(0).tolist(), first_bad])
        else:
            self.totals = self._totals(self.values.tolist())
        self._peeked, self._read_at = None, time.perf_counter()
        return self.totals

    def peek(self) -> Totals:
        """Returns slightly outdated sums without waiting for the GPU. On a CPU, returns the sums as last read."""
        if self._peeked is not None:
            values, event = self._peeked
            if event.query():
                self.totals, self._peeked = self._totals(values.tolist()), None
        elif self.values.is_cuda and time.perf_counter() - self._read_at > PEEK_SECONDS:
            values = torch.empty(len(self.values), dtype=torch.float64, pin_memory=True)
            values.copy_(self.values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._peeked, self._read_at = (values, event), time.perf_counter()
        return self.totals

    def _totals(self, values: list[float]) -> Totals:
        loss, *scalars, images, first_bad = values
        return Totals(loss, dict(zip(self.names, scalars, strict=True)), images, int(first_bad))


class TrainStep:
    """Runs training steps: forward and backward pass, gradient clipping, and update of the weights and their average.

    Args:
        stream: the CUDA stream of the run; None on a CPU.
    """

    def __init__(self, setup: TrainingSetup, stream: torch.cuda.Stream | None = None) -> None:
        self.setup, self.stream = setup, stream
        self.sums = EpochSums([metric.name for metric in setup.task.train_metrics], setup.processes)
        self.steps_run = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.static_batch: Any = None  # the input of the captured graph
        unsupported = capture_unsupported_reason(setup)
        if setup.recipe.cuda_graph == "yes" and unsupported:
            raise TrainingError(f"cuda_graph=yes: the step cannot be captured, {unsupported}")
        self.captures = not unsupported

    def run(self, batch: Any) -> None:
        """Runs one step on a batch that the training batches yielded."""
        setup = self.setup
        if self.captures and self.steps_run >= WARMUP_STEPS:
            self._replay(batch)
        else:
            self._run_eagerly(batch)
        if setup.recipe.clip_grad is not None:
            setup.scaler.unscale_(setup.optimizer)
            nn.utils.clip_grad_norm_(setup.network.parameters(), setup.recipe.clip_grad)
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        if setup.ema is not None:
            setup.ema.update(setup.network)
        self.steps_run += 1

    def check_loss(self, epoch: int) -> None:
        """Reads the sums and raises if a loss was not finite. Every rank must call this."""
        setup, bad = self.setup, self.sums.read().first_bad_step
        if bad < 0:
            return
        setup.set_lr(epoch, bad)  # the learning rate of that step, for the message
        raise TrainingError(
            f"the loss is not finite at epoch {epoch + 1}, step {bad + 1} of {setup.batches.steps}, learning rate "
            f"{setup.lr:.3g}; the last checkpoint is from before it. Lower lr or set clip_grad; the batch was "
            f"{', '.join(setup.batches.names(epoch, bad))}"
        )

    def restart(self) -> None:
        """Forgets the captured graph, because other parameters are trained from now on."""
        if self.graph is not None:
            torch.cuda.synchronize()  # it may still be running
        self.release()
        self.steps_run = 0

    def release(self) -> None:
        """Frees the memory of the captured graph."""
        self.graph = self.static_batch = None

    def _run_eagerly(self, batch: Any) -> None:
        self.setup.optimizer.zero_grad(set_to_none=True)
        splits = split_batch(batch, self.setup.recipe.accumulate)
        for index, (split, weight) in enumerate(splits):
            with nullcontext() if index == len(splits) - 1 else self._no_sync():
                self.forward_backward(split, weight)
        self.sums.step += 1

    def _no_sync(self) -> AbstractContextManager[Any]:
        replicated = self.setup.replicated
        return replicated.no_sync() if isinstance(replicated, DistributedDataParallel) else nullcontext()

    def forward_backward(self, batch: Any, weight: float = 1.0) -> None:
        """Accumulates the gradients of a batch, with its loss multiplied by ``weight``, and adds to the sums."""
        setup = self.setup
        images, targets = setup.batches.transform_batch(batch)
        with setup.autocast():
            outputs = setup.task.forward(setup.model, images, targets)
        loss, scalars = setup.task.loss(outputs, targets)
        setup.scaler.scale(loss * weight).backward()
        self.sums.add(loss.detach(), scalars, len(images))

    def _replay(self, batch: Tensor) -> None:
        """Replays the captured step. The first call captures it."""
        if self.graph is None:
            self.static_batch = batch.clone()
            self.graph = self._capture()
        self.static_batch.copy_(batch)
        self.graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        setup = self.setup
        setup.optimizer.zero_grad(set_to_none=True)  # gradients must be allocated in the memory pool of the graph
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(setup.batches.generator)  # type: ignore[attr-defined]
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self.forward_backward(self.static_batch)
                self.sums.step += 1
        except RuntimeError as error:
            raise TrainingError(
                f"the step of {setup.recipe.model} cannot be captured as a CUDA graph ({reason(error)[:200]}): "
                f"set cuda_graph=no"
            ) from error
        return graph


def capture_unsupported_reason(setup: TrainingSetup) -> str:
    """Returns why the step cannot be captured as a CUDA graph; an empty string if it can."""
    if setup.recipe.cuda_graph == "no":
        return "the recipe says no"
    if setup.device.type != "cuda":
        return "there is no GPU"
    if not isinstance(setup.batches, ResidentTrainBatches):
        return "the images are not resident"
    if setup.processes.world_size > 1 or setup.recipe.accumulate > 1:
        return "one process and accumulate=1 are needed"
    if setup.recipe.precision == "float16":
        return "float16's scaler looks at the gradients"
    return ""


def split_batch(batch: Any, count: int) -> list[tuple[Any, float]]:
    """Splits a batch into ``count`` splits, and returns each with its fraction of the batch.

    A batch with fewer than ``count`` images, because some could not be read, gives fewer splits.

    Args:
        batch: indices, or pixels and targets.
    """
    if count == 1:
        return [(batch, 1.0)]
    tensors = (batch,) if isinstance(batch, Tensor) else batch
    total = len(tensors[0])
    splits = list(zip(*(tensor.tensor_split(min(count, total)) for tensor in tensors), strict=True))
    return [(split[0] if isinstance(batch, Tensor) else split, len(split[0]) / total) for split in splits]
