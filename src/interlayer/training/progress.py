"""Where a run is, for whoever shows it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..tasks import Metric


@dataclass(frozen=True)
class Progress:
    """Where a run is. Loss and metrics are of the epoch so far, as last read.

    Args:
        folder: the folder of the run.
        what: what is being done: loading, training, evaluating, evaluated, testing, done.
        metrics: means of the task's training metrics.
        headline: the task's headline metric, once the task is known.
        held_out: the headline's value in the last evaluation; NaN before the first.
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
    """The time of an epoch that starts now.

    Args:
        start: the step that the epoch starts at, in this process.
        steps: steps of a whole epoch.
        batch_size: images of a step, over all ranks.
    """

    def __init__(self, start: int, steps: int, batch_size: int) -> None:
        self.start, self.steps, self.batch_size = start, steps, batch_size
        self.began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def rate(self, step: int, seconds: float) -> float:
        """Returns images a second, with ``step`` steps of the epoch done after ``seconds``."""
        return (step - self.start) * self.batch_size / seconds

    def seconds_left(self, step: int, epochs_left: int, seconds: float) -> float:
        """Returns the time that this epoch's rest and the epochs after it will take.

        Args:
            epochs_left: number of epochs from the start of this one to the end of the run.
        """
        return seconds / (step - self.start) * (epochs_left * self.steps - step)
