"""The logs of a run, one row per epoch: metrics.csv, TensorBoard and, if requested, Weights & Biases."""

from __future__ import annotations

import csv
import io
import math
import uuid
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..tasks import Scores, Task
from .files import TrainingError, flush, write_text, writing
from .progress import EpochClock
from .recipe import Recipe
from .setup import TrainingSetup
from .step import Totals

TIMES = ("seconds", "eval_seconds", "images_per_second")  # the columns that differ between two otherwise equal runs


def columns(task: Task) -> list[str]:
    """Returns the columns of metrics.csv: the ones that every run has, and one for each metric of the task."""
    trained = [f"train_{metric.name}" for metric in task.train_metrics]
    evaluated = [f"eval_{metric.name}" for metric in task.eval_metrics]
    losses = ["eval_loss"] if task.evaluates_loss else []
    return ["epoch", "step", "lr", "train_loss", *trained, *losses, *evaluated, *TIMES]


def epoch_row(
    setup: TrainingSetup,
    epoch: int,
    totals: Totals,
    scores: Scores | None,
    clock: EpochClock,
    eval_seconds: float,
) -> dict[str, Any]:
    """Returns the row of one epoch, with an entry for each of `columns`.

    Args:
        totals: the sums of the epoch's training steps.
        scores: the evaluation after the epoch; None if there was none, whose entries are NaN.
        clock: measures the time and the rate of the epoch.
        eval_seconds: the time spent in evaluation.
    """
    steps = setup.batches.steps
    evaluated = {} if scores is None else scores.metrics
    return {
        "epoch": epoch + 1,
        "step": (epoch + 1) * steps,
        "lr": setup.lr,
        "train_loss": totals.mean_loss,
        **{f"train_{name}": mean for name, mean in totals.means.items()},
        **({"eval_loss": evaluated.get("loss", math.nan)} if setup.task.evaluates_loss else {}),
        **{f"eval_{metric.name}": evaluated.get(metric.name, math.nan) for metric in setup.task.eval_metrics},
        "seconds": clock.epoch_seconds,
        "eval_seconds": eval_seconds,
        "images_per_second": clock.epoch_rate,
    }


class Logs:
    """The logs of one run.

    Args:
        rows: the rows of earlier epochs, if the run is resumed. Any further rows in the files are dropped.
    """

    def __init__(self, folder: Path, recipe: Recipe, task: Task, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        self.path, self.columns = folder / "metrics.csv", columns(task)
        text = io.StringIO()
        # rows of a run that an earlier version started can have further columns
        writer = csv.DictWriter(text, self.columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.path, text.getvalue())
        self.tensorboard = _tensorboard(folder, len(rows) + 1) if recipe.tensorboard else None
        self.wandb = _wandb(folder, recipe) if recipe.wandb else None

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds the row of an epoch. The row is flushed to disk before this method returns."""
        with writing(self.path), open(self.path, "a", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(row)
            flush(file)
        values = {key: value for key, value in row.items() if key not in ("epoch", "step") and not math.isnan(value)}
        if self.tensorboard is not None:
            for key, value in values.items():
                self.tensorboard.add_scalar(key.replace("_", "/", 1), value, row["epoch"])
            self.tensorboard.flush()
        if self.wandb is not None:
            self.wandb.log(values, step=row["step"])

    def close(self) -> None:
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Reads the rows of a run's metrics.csv."""
    with open(folder / "metrics.csv", newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _tensorboard(folder: Path, epoch: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    with writing(folder / "tensorboard"):
        return SummaryWriter(str(folder / "tensorboard"), purge_step=epoch)


def check_logs(recipe: Recipe) -> None:
    """Raises if a requested log cannot be written, before any file is written."""
    if recipe.wandb and not find_spec("wandb"):
        raise TrainingError(f"wandb={recipe.wandb} needs Weights & Biases: pip install wandb, or leave wandb out")


def _wandb(folder: Path, recipe: Recipe) -> Any:
    import wandb

    identity = uuid.uuid5(uuid.NAMESPACE_URL, str(folder.resolve())).hex  # a resumed run continues the same W&B run
    return wandb.init(project=recipe.wandb, dir=str(folder), name=folder.name, id=identity, resume="allow")
