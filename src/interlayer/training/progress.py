"""The progress of a run, for display."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..tasks import Metric
from .setup import TrainingSetup
from .step import Totals


@dataclass(frozen=True)
class Progress:
    """The progress of a run. The loss and the metrics are means over the epoch so far, as last read.

    Args:
        folder: the folder of the run.
        what: the current activity: loading, training, evaluating, evaluated, testing or done.
        metrics: means of the task's training metrics.
        headline: the task's headline metric; None while the data is loading.
        held_out: the value of the headline metric in the last evaluation; NaN before the first.
    """

    folder: Path
    what: str
    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float = math.nan
    metrics: Mapping[Metric, float] = field(default_factory=dict)
    headline: Metric | None = None
    held_out: float = math.nan
    images_per_second: float = math.nan
    seconds_left: float = math.nan


class EpochClock:
    """Measures the time of an epoch, which starts when the clock is created.

    Args:
        start: the step at which this process enters the epoch.
        steps: number of steps in a complete epoch.
        batch_size: number of images in a step, over all ranks.
        before: the seconds that the steps before it took; 0 if they are not known.
    """

    def __init__(self, start: int, steps: int, batch_size: int, before: float = 0.0) -> None:
        self.start, self.steps, self.batch_size, self.before = start, steps, batch_size, before
        self.began = time.perf_counter()
        self.ended: float | None = None

    def stop(self) -> None:
        """Ends the epoch. What follows is not counted."""
        self.ended = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The time since this process entered the epoch."""
        return (self.ended or time.perf_counter()) - self.began

    @property
    def epoch_seconds(self) -> float:
        """The time of the epoch, also before this process."""
        return self.before + self.seconds

    @property
    def epoch_rate(self) -> float:
        """The images per second of the complete epoch."""
        steps = self.steps if self.before else self.steps - self.start
        return steps * self.batch_size / self.epoch_seconds

    def rate(self, step: int, seconds: float) -> float:
        """Returns the images per second, if ``step`` steps of the epoch are done after ``seconds``."""
        return (step - self.start) * self.batch_size / seconds

    def seconds_left(self, step: int, epochs_left: int, seconds: float) -> float:
        """Estimates the time until the end of the run.

        Args:
            epochs_left: number of epochs from the start of this one to the end of the run.
        """
        return seconds / (step - self.start) * (epochs_left * self.steps - step)


def run_progress(
    setup: TrainingSetup,
    folder: Path,
    what: str,
    epoch: int,
    step: int,
    totals: Totals,
    rows: Sequence[Mapping[str, Any]],
    clock: EpochClock,
) -> Progress:
    """Returns the progress of a run that is set up. The rate and the time left are known only while it is training.

    Args:
        totals: the sums of the epoch so far.
        rows: the rows of the log.
        clock: measures the time of the epoch.
    """
    recipe, task, means = setup.recipe, setup.task, totals.means
    rate = left = math.nan
    if what == "training":
        seconds = clock.seconds
        rate = clock.rate(step, seconds)
        left = clock.seconds_left(step, recipe.epochs - epoch, seconds)
    return Progress(
        folder, what, epoch, recipe.epochs, step, setup.batches.steps, totals.mean_loss,
        {metric: means[metric.name] for metric in task.train_metrics}, task.headline,
        rows[-1][f"eval_{task.headline.name}"] if rows else math.nan, rate, left,
    )  # fmt: skip
