"""What a run understood: its data, network, weights, learning rates, schedule and device, in a few lines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..models.origin import new_mechanism_parameters, untrained_mechanisms
from .data.resident import ResidentTrainBatches
from .optimization import warmup_epochs
from .recipe import Recipe
from .setup import TrainingSetup
from .wording import listing, plural

SHOWN_CLASSES = 5


@dataclass(frozen=True)
class Overview:
    """The opening lines of a run.

    Args:
        model: name of the network.
        data: lines about the data, the schedule and the device, which all runs of a comparison share.
        network: lines about the network, its weights and its learning rates.
    """

    model: str
    data: list[str]
    network: list[str]

    def lines(self) -> list[str]:
        """Returns all lines."""
        return [*self.data, *self.network]


def overview_of(setup: TrainingSetup, *, epoch: int = 0, step: int = 0) -> Overview:
    """Describes a run that is ready to train, or to continue after some epochs and steps."""
    steps = setup.batches.steps
    resumed = f"those of the checkpoint at epoch {epoch + 1}, step {step} of {steps}" if epoch or step else ""
    return Overview(
        setup.recipe.model,
        data=[
            f"data: {_data(setup)}",
            *(f"note: {note}" for note in setup.data.notes),
            f"schedule: {_schedule(setup)}",
            f"device: {_device(setup)}",
        ],
        network=[
            f"network: {_network(setup)}",
            f"weights: {resumed or _weights(setup)}",
            f"learning rate: {_learning_rates(setup)}",
        ],
    )


def _data(setup: TrainingSetup) -> str:
    sources = {"training": setup.data.train, "validation": setup.data.validation, "test": setup.data.test}
    counts = [
        f"{len(source):,} {name}{_folder(setup, source)}" for name, source in sources.items() if source is not None
    ]
    classes = setup.task.classes
    names = ", ".join(classes[:SHOWN_CLASSES]) + (", ..." if len(classes) > SHOWN_CLASSES else "")
    listed = f"{plural(len(classes), 'class', 'classes')}: {names}"
    return f"{setup.recipe.data}, {listing(counts)} images, {listed}"


def _folder(setup: TrainingSetup, source: Any) -> str:
    """Returns the folder of a split below the folder of the data, in brackets; nothing if the split has none."""
    root = getattr(source, "root", None)
    if root is None:
        return ""
    folder = os.path.relpath(root, Path(setup.recipe.data).expanduser())
    return "" if folder == os.curdir else f" ({folder}/)"


def _schedule(setup: TrainingSetup) -> str:
    recipe, steps = setup.recipe, setup.batches.steps
    size = f"{plural(recipe.epochs, 'epoch')} of {plural(steps, 'step')} with {plural(recipe.batch_size, 'image')}"
    seldom = f", evaluated every {recipe.eval_every} epochs" if recipe.eval_every > 1 else ""
    return f"{size}, {recipe.schedule} by {recipe.schedule_on}, {_warmup(recipe, steps)}{seldom}"


def _warmup(recipe: Recipe, steps: int) -> str:
    epochs = warmup_epochs(recipe, steps)
    if recipe.warmup_steps:
        shortened = epochs * steps < recipe.warmup_steps
        why = f", because warmup_steps={recipe.warmup_steps} would not end within the run" if shortened else ""
        return f"warm-up of {plural(round(epochs * steps), 'step')}{why}"
    if not recipe.warmup_epochs:
        return "no warm-up"
    shown = f"warm-up of {plural(epochs, 'epoch')}" if epochs else "no warm-up"
    if epochs == recipe.warmup_epochs:
        return shown
    return f"{shown}, because warmup_epochs={recipe.warmup_epochs:g} would not end within the run"


def _device(setup: TrainingSetup) -> str:
    recipe, processes = setup.recipe, setup.processes
    name = torch.cuda.get_device_name(setup.device) if setup.device.type == "cuda" else "CPU"
    ranks = f" in each of {processes.world_size} processes" if processes.world_size > 1 else ""
    if isinstance(setup.batches, ResidentTrainBatches):
        images = "images on the device"
    else:
        workers = setup.loading.recipe.workers
        fewer = f" instead of {recipe.workers}, one per core" if workers != recipe.workers else ""
        images = f"images loaded by {plural(workers, 'worker')}{fewer}" if workers else "images loaded without workers"
    precision = "float32" if recipe.precision == "tf32" and setup.device.type != "cuda" else recipe.precision
    return f"{name}{ranks}, {precision}, {images}"


def _network(setup: TrainingSetup) -> str:
    network, size = setup.network, setup.loading.transform.size
    total, new = _count(network.parameters()), setup.origin.new_parameters(network)
    text = f"{setup.recipe.model}, {setup.task.shown_size(size)}, {total:,} parameters"
    if not setup.origin.source or not new:
        return text
    mechanism = _count(new_mechanism_parameters(network, setup.origin))
    other = _count(new.values()) - mechanism
    shares = {"the mechanism": mechanism, setup.task.new_modules: other}
    listed = [f"{count:,} of {what}" if mechanism and other else what for what, count in shares.items() if count]
    return f"{text}, {mechanism + other:,} new ({listing(listed)})"


def _weights(setup: TrainingSetup) -> str:
    origin = setup.origin
    if not origin.source:
        return "none, all parameters are newly initialized"
    head = ""
    if origin.classes is not None:
        head = f"; the classifier for {origin.classes} classes is replaced by a new one for {len(setup.task.classes)}"
    elif setup.recipe.zero_head:
        head = "; the classifier is reset to zeros"
    start = ""
    if untrained_mechanisms(setup.network, origin):
        start = (
            "; the untrained mechanism changes its outputs from the start"
            if setup.starts_changed
            else "; the mechanism starts as the identity"
        )
    return f"{origin.source}, {plural(len(origin.loaded), 'tensor')} loaded{head}{start}"


def _learning_rates(setup: TrainingSetup) -> str:
    recipe, lr = setup.recipe, setup.recipe.scaled_lr
    if not setup.origin.source:
        return f"{lr:g} ({recipe.optimizer})"
    new = {id(p) for p in setup.origin.new_parameters(setup.network).values()}
    own_rate = recipe.mechanism_lr_scale is not None
    mechanism = {id(p) for p in new_mechanism_parameters(setup.network, setup.origin)} if own_rate else set()
    scales: dict[str, set[float]] = {"loaded parameters": set(), "new ones": set(), "those of the mechanism": set()}
    for group in setup.optimizer.param_groups:
        for key in map(id, group["params"]):
            what = "those of the mechanism" if key in mechanism else "new ones" if key in new else "loaded parameters"
            scales[what].add(group.get("lr_scale", 1.0))
    rates = [f"{_range(lr, sorted(found))} for {what}" for what, found in scales.items() if found]
    freeze = setup.freeze.steps
    frozen = ""
    if freeze:
        whole = freeze >= recipe.epochs * setup.batches.steps
        until = "the whole run" if whole else f"the first {plural(int(freeze), 'step')}"
        if whole and not recipe.freeze_backbone:
            until += f", because freeze_epochs={recipe.freeze_epochs:g} does not end within it"
        frozen = f"; only new parameters are trained for {until}"
    return f"{listing(rates)} ({recipe.optimizer}){frozen}"


def _range(lr: float, scales: Sequence[float]) -> str:
    ends = dict.fromkeys((f"{lr * scales[0]:.3g}", f"{lr * scales[-1]:.3g}"))
    return " to ".join(ends)


def _count(parameters: Any) -> int:
    return sum(parameter.numel() for parameter in parameters)
