"""The results of a finished run: summary.json, the tested weights and the predictions."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..analysis import Contribution
from ..models.checkpoints import save_weights
from ..tasks import Scores, Task
from .checkpoint import RunState
from .evaluation import save_records
from .files import TrainingError, write_json
from .overview import overview_of
from .setup import TrainingSetup


def run_summary(
    setup: TrainingSetup, state: RunState, scores: Scores, command: str, contribution: Contribution | None = None
) -> dict[str, Any]:
    """Returns the contents of summary.json.

    Args:
        scores: the scores on the test split.
        command: the command that reproduces this run.
        contribution: the contribution of the network's mechanisms on the test split; None if it has none.
    """
    task, transform = setup.task, setup.loading.transform
    by_validation = state.best is not None
    return {
        "model": setup.recipe.model,
        "seed": setup.recipe.seed,
        "test": {
            **task_scores(task, scores),
            "images": scores.count,
        },
        "contribution": None if contribution is None else contribution.as_dict(),
        "chosen_epoch": int(state.best["epoch"]) if state.best is not None else setup.recipe.epochs,
        "chosen_by": f"validation {task.headline.title}" if by_validation else "last epoch",
        "epochs": setup.recipe.epochs,
        "train_images": len(setup.data.train),
        **task.summary(),
        "image_size": transform.size,
        "mean": list(transform.mean),
        "std": list(transform.std),
        "crop_pct": transform.crop_pct,
        "interpolation": transform.interpolation,
        "seconds": state.seconds,
        "device": torch.cuda.get_device_name(setup.device) if setup.device.type == "cuda" else "CPU",
        "processes": setup.processes.world_size,
        "bad_images": setup.data.problems.found,
        "notes": setup.data.notes,
        "overview": overview_of(setup).lines(),
        "command": command,
        "versions": versions(),
    }


def task_scores(task: Task, scores: Scores) -> dict[str, float | None]:
    """Returns the metrics of a task and its loss, if it has one. Values that are not defined are None, as in JSON."""
    names = [*(metric.name for metric in task.eval_metrics), *(["loss"] if task.evaluates_loss else [])]
    return {name: None if math.isnan(scores.metrics[name]) else scores.metrics[name] for name in names}


def write_results(folder: Path, setup: TrainingSetup, scores: Scores, summary: Mapping[str, Any]) -> None:
    """Writes the tested weights, the predictions and the summary. Every rank must call this; rank 0 writes."""
    weights = setup.evaluated_weights()
    if setup.processes.is_main:
        save_weights(setup.network, folder / "weights.safetensors", weights)
        save_records(scores, folder)
        write_json(folder / "summary.json", summary)
    setup.processes.wait()


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for name in ("interlayer", "torch", "torchvision", "timm", "accelerate", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "from source"
    return found


def read_contribution(summary: Mapping[str, Any]) -> Contribution | None:
    """Returns the contribution of the mechanisms in a summary; None if the network has none."""
    values = summary.get("contribution")
    return None if values is None else Contribution.from_dict(values)


def read_summary(folder: Path) -> dict[str, Any]:
    """Reads the summary.json of a finished run."""
    path = folder / "summary.json"
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise TrainingError(f"{folder} holds no finished run: {path.name} is missing") from error
    except json.JSONDecodeError as error:
        raise TrainingError(f"{path} is damaged: {error}") from error
