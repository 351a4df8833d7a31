"""The logs of a run, a row an epoch: metrics.csv, TensorBoard, and Weights & Biases where it is asked for."""

from __future__ import annotations

import csv
import io
import uuid
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..tasks import Task
from .files import TrainingError, flush, write_text, writing
from .recipe import Recipe

TIMES = ("seconds", "eval_seconds", "images_per_second")  # the columns that two equal runs may differ in


def columns(task: Task) -> list[str]:
    """Returns the columns of metrics.csv: those of every run, and those of the task's metrics."""
    trained = [f"train_{metric.name}" for metric in task.train_metrics]
    evaluated = [f"eval_{metric.name}" for metric in task.eval_metrics]
    return ["epoch", "step", "lr", "train_loss", *trained, "eval_loss", *evaluated, *TIMES]


class Logs:
    """The logs of one run.

    Args:
        rows: the rows of the epochs before, if the run is resumed; what the files hold beyond them is dropped.
    """

    def __init__(self, folder: Path, recipe: Recipe, task: Task, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        self.path, self.columns = folder / "metrics.csv", columns(task)
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.path, text.getvalue())
        self.tensorboard = _tensorboard(folder, len(rows) + 1) if recipe.tensorboard else None
        self.wandb = _wandb(folder, recipe) if recipe.wandb else None

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds the row of an epoch; it is on the disk before training goes on."""
        with writing(self.path), open(self.path, "a", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(row)
            flush(file)
        values = {key: value for key, value in row.items() if key not in ("epoch", "step")}
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
    """Refuses logs that cannot be written here, before anything is."""
    if recipe.wandb and not find_spec("wandb"):
        raise TrainingError(f"wandb={recipe.wandb} needs Weights & Biases: pip install wandb, or leave wandb out")


def _wandb(folder: Path, recipe: Recipe) -> Any:
    import wandb

    identity = uuid.uuid5(uuid.NAMESPACE_URL, str(folder.resolve())).hex  # so that a resumed run goes on there too
    return wandb.init(project=recipe.wandb, dir=str(folder), name=folder.name, id=identity, resume="allow")
