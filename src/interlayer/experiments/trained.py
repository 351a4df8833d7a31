"""Finished runs and their trained networks, read from the folders of the runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch

from ..models import load_weights
from ..tasks import FinishedRun, Task, make_task
from ..training import Recipe, TrainingError
from ..training.data import BatchTransform, ImageTransform
from ..training.evaluation import RECORDS_FILE
from ..training.recipe import read_recipe
from ..training.setup import build_network
from ..training.summary import read_summary


def read_run(folder: Path) -> FinishedRun:
    """Reads the summary of a finished run and its predictions for the test images."""
    summary, path = read_summary(folder), folder / RECORDS_FILE
    return FinishedRun(summary["model"], summary, safetensors.torch.load_file(path) if path.exists() else {})


def task_of(recipe: Recipe, classes: Sequence[str]) -> Task:
    """Returns the task of a recipe. The network that it builds does not load the weights that the recipe names."""
    return make_task(dataclasses.asdict(recipe.replace(pretrained=False, weights=None)), classes)


class TrainedNetwork:
    """The network of a finished run, in eval mode.

    Args:
        folder: the folder of the run.
        weights: a file with other weights of the same network; the weights that the run tested if None.
        device: the device of the network; a GPU if available, if None.

    Attributes:
        recipe: the recipe of the run.
        task: the task of the run.
        network: the network with its trained weights.
        transform: the transform of an image to the network's input.
        batch_transform: normalizes batches on the device.
    """

    def __init__(self, folder: Path, weights: Path | None = None, *, device: torch.device | None = None) -> None:
        if not (folder / "recipe.yaml").is_file():
            raise TrainingError(f"{folder} holds no run: expected the folder that `interlayer train` wrote")
        summary = read_summary(folder)
        self.recipe = read_recipe(folder / "recipe.yaml")
        self.task = task_of(self.recipe, summary.get("classes", []))
        self.network = build_network(self.task)
        load_weights(self.network, weights or folder / "weights.safetensors")
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.network.to(self.device).eval()
        self.transform = ImageTransform(
            summary["image_size"], tuple(summary["mean"]), tuple(summary["std"]), summary["interpolation"],
            summary["crop_pct"],
        )  # fmt: skip
        self.batch_transform = BatchTransform.of(
            self.recipe, self.task, self.transform.mean, self.transform.std, self.device
        )
