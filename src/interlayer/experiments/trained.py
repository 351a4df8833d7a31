"""Networks that are ready to be applied to images: the network of a run, and any other network with trained weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from ..models import load_weights
from ..models.build import ModelError, check_size
from ..tasks import FinishedRun, Task, make_task
from ..training import Recipe, TrainingError, load_recipe
from ..training.data import BatchTransform, ClassNames, ImageTransform
from ..training.evaluation import RECORDS_FILE
from ..training.processes import check_device
from ..training.recipe import read_recipe
from ..training.setup import build_network
from ..training.summary import read_summary

TRANSFORM_KEYS = ("image_size", "mean", "std", "interpolation", "crop_pct")
LOADING_KEYS = ("data_options", "on_bad_image", "workers", "resident", "eval_batch_size", "device", "channels_last")


def read_run(folder: Path) -> FinishedRun:
    """Reads the summary of a finished run and its predictions for the test images."""
    summary, path = read_summary(folder), folder / RECORDS_FILE
    return FinishedRun(summary["model"], summary, safetensors.torch.load_file(path) if path.exists() else {})


def task_of(recipe: Recipe, classes: Sequence[str]) -> Task:
    """Returns the task of a recipe. The network that it builds does not load the weights that the recipe names."""
    return make_task(dataclasses.asdict(recipe.replace(pretrained=False, weights=None)), classes)


class LoadedNetwork:
    """A network in eval mode, with the transform of its images and the names of its classes.

    Args:
        recipe: how images are loaded.
        task: what the network computes.
        network: the network. It is moved to the device.
        transform: the transform of an image to the network's input.
        class_names: the classes of the network; None if their names are not known.
        device: the device of the network; the one that the recipe names if None, or a GPU if available.

    Attributes:
        title: the name of the network, which also says if its weights are random.
        classes: the name of each class, by label.
        summary: the contents of summary.json; empty if the network does not come from a run.
        data_options: the options of the reader that were given for other data than that of the run.
        batch_transform: normalizes batches on the device.

    >>> logits = loaded.network(loaded.transform(PIL.Image.open("photo.jpg"))[None].to(loaded.device))
    """

    has_weights = True

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        network: nn.Module,
        transform: ImageTransform,
        *,
        class_names: ClassNames | None,
        device: torch.device | None = None,
        summary: Mapping[str, Any] | None = None,
    ) -> None:
        self.recipe, self.task, self.transform, self.class_names = recipe, task, transform, class_names
        check_device(recipe)
        self.summary = dict(summary or {})
        self.data_options = dict(recipe.data_options)
        self.device = device or torch.device(recipe.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.network = network.to(self.device).eval()
        self.batch_transform = BatchTransform.of(recipe, task, transform.mean, transform.std, self.device)

    @property
    def title(self) -> str:
        return self.recipe.model + ("" if self.has_weights else ", untrained")

    @property
    def classes(self) -> list[str]:
        return self.task.classes

    def label_of(self, name: str) -> int:
        """Returns the label of a class, given its name or number. See `ClassNames.label`."""
        return (self.class_names or ClassNames(self.classes)).label(name)


class TrainedNetwork(LoadedNetwork):
    """The network of a finished run, in eval mode.

    Args:
        folder: the folder of the run.
        weights: a file with other weights of the same network; the weights that the run tested if None.
        device: the device of the network; a GPU if available, if None.
        overrides: values that replace those of the recipe, such as "crop_pct=1.0": how images are loaded and
            transformed. The network is the one that was trained.
    """

    def __init__(
        self,
        folder: Path,
        weights: Path | None = None,
        *,
        device: torch.device | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        if not (folder / "recipe.yaml").is_file():
            raise TrainingError(f"{folder} holds no run: expected the folder that `interlayer train` wrote")
        summary, file = read_summary(folder), folder / "recipe.yaml"
        recipe = load_recipe(str(file), ["device=null", *overrides])  # the run may have used another machine
        given = check_overrides(overrides, (*TRANSFORM_KEYS, *LOADING_KEYS))
        task = task_of(read_recipe(file), summary.get("classes", []))
        network = build_network(task)
        load_weights(network, weights or folder / "weights.safetensors")
        transform = ImageTransform(
            summary["image_size"], tuple(summary["mean"]), tuple(summary["std"]), summary["interpolation"],
            summary["crop_pct"],
        )  # fmt: skip
        transform = replaced_transform(transform, recipe, given)
        if "image_size" in given:
            check_image_size(network, recipe.model, transform.size)
        names = ClassNames.of(task.classes)
        super().__init__(recipe, task, network, transform, class_names=names, device=device, summary=summary)
        keys = {override.partition("=")[0].strip() for override in overrides}
        if "data_options" not in keys:
            self.data_options = {k: v for k, v in self.data_options.items() if f"data_options.{k}" in keys}


def load_run(
    folder: str | Path, *, weights: str | Path | None = None, device: str | torch.device = "cpu"
) -> TrainedNetwork:
    """Loads the network of a finished run, with the transform of its images and its classes.

    Args:
        folder: the folder that `interlayer train` wrote.
        weights: a file with other weights of the same network; the weights that the run tested if None.
        device: the device of the network.

    Returns:
        A record with the ``network`` in eval mode, the ``transform`` of a PIL image to the network's normalized input
        [3, H, W], the names of the ``classes`` by label, the ``recipe`` and the ``summary`` of the run.

    >>> run = interlayer.load_run("runs/mine")
    >>> logits = run.network(run.transform(PIL.Image.open("photo.jpg"))[None])
    >>> run.classes[int(logits.argmax())]
    """
    return TrainedNetwork(Path(folder), Path(weights) if weights else None, device=torch.device(device))


def check_overrides(overrides: Sequence[str], allowed: Collection[str]) -> set[str]:
    """Returns the keys of ``key=value`` overrides. Raises if one of them has no effect outside training."""
    given = {override.partition("=")[0].strip().split(".")[0] for override in overrides}
    for key in sorted(given.difference(allowed)):
        raise TrainingError(f"{key} has no effect here; the options are: {', '.join(allowed)}")
    return given


def replaced_transform(transform: ImageTransform, recipe: Recipe, given: Collection[str]) -> ImageTransform:
    """Returns a transform with the values of the recipe that were given explicitly."""
    names = {"image_size": "size"}
    changes = {names.get(key, key): getattr(recipe, key) for key in TRANSFORM_KEYS if key in given}
    changes |= {key: tuple(changes[key]) for key in ("mean", "std") if key in changes}
    return dataclasses.replace(transform, **changes)


def check_image_size(network: nn.Module, name: str, size: int) -> None:
    """Raises if the network does not accept images of ``size`` x ``size`` pixels."""
    try:
        check_size(network, name, size)
    except ModelError as error:
        raise TrainingError(str(error)) from error
