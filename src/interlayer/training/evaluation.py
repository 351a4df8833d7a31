"""Evaluation of a network on a set of images with the metrics of a task."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..analysis import TaskContribution
from ..models.checkpoints import write_tensors
from ..tasks import Collective, Scores, Task
from .data import EvalBatches, open_batches
from .files import TrainingError
from .setup import TrainingSetup

RECORDS_FILE = "predictions.safetensors"


def evaluate_batches(
    task: Task,
    network: nn.Module,
    batches: EvalBatches,
    *,
    normalize: Callable[[Tensor], Tensor],
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    collective: Collective | None = None,
    records: bool = False,
    contribution: TaskContribution | None = None,
) -> Iterator[Scores | None]:
    """Evaluates a network, which must be in eval mode, on batches.

    This is a generator, so that several runs can alternate. It yields None after every batch, and the scores last. Sums
    stay on the device until the end.

    Args:
        normalize: converts bytes [B, 3, H, W] to the input of the network.
        collective: the ranks that evaluate together; every rank must exhaust the generator.
        records: whether to keep the prediction for each image.
        contribution: if given, every batch is also run without the mechanisms of the network.
    """
    evaluator, updated = task.evaluator(records=records), False
    with open_batches(batches) as loaded:
        for pixels, targets, places in loaded:
            with torch.no_grad():
                with autocast():
                    images = normalize(pixels)
                    forward = partial(task.forward, network, images, targets)
                    outputs = forward() if contribution is None else contribution.run(forward, targets, places)
                evaluator.update(outputs, targets, places)
            updated = True
            yield None
    if not updated:
        raise TrainingError("there is no image to evaluate on")
    scores = evaluator.result(collective or Collective())
    if not scores.count:
        raise TrainingError("none of the images to evaluate on can be read")
    yield scores


def evaluate_setup(
    setup: TrainingSetup,
    batches: EvalBatches,
    *,
    records: bool = False,
    contribution: TaskContribution | None = None,
) -> Generator[Scores | None, None, None]:
    """Evaluates the network of a training run, or its moving average. Every rank must exhaust the generator."""
    network = setup.evaluated_network
    setup.broadcast_buffers(network)
    network.eval()
    try:
        yield from evaluate_batches(
            setup.task, network, batches, normalize=setup.batches.batch_transform.normalize, autocast=setup.autocast,
            collective=setup.processes, records=records, contribution=contribution,
        )  # fmt: skip
    finally:
        setup.train()


def check_finite_loss(task: Task, scores: Scores, epoch: int) -> None:
    """Raises if the loss of the evaluation after ``epoch`` is not finite."""
    if task.evaluates_loss and not math.isfinite(scores.metrics["loss"]):
        raise TrainingError(
            f"the evaluation after epoch {epoch + 1} has a loss that is not finite; the last checkpoint is from "
            f"before it. Lower lr or set clip_grad"
        )


def save_records(scores: Scores, folder: Path) -> None:
    """Writes the prediction for each image into the folder of a run."""
    if scores.records:
        write_tensors(dict(scores.records), folder / RECORDS_FILE)
