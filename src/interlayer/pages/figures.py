"""The figures of a report: training curves and attention scores between layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..analysis import layer_scores, plot_layer_scores
from ..experiments import TrainedNetwork
from ..hosts import attached_mechanisms
from ..tasks import Task
from ..tasks.show import spread
from ..training.data import Images
from ..training.logs import read_metrics
from ..training.summary import read_summary
from .rendering import colour, sentence_case, svg

SCORED_IMAGES = 64  # number of test images over which attention scores are averaged


@dataclass(frozen=True)
class Shown:
    """A figure on a page.

    Args:
        alt: a description of the figure.
        source: the image as a data URI.
    """

    alt: str
    source: str


@dataclass(frozen=True)
class Attention:
    """The attention scores between the layers of a network.

    Args:
        model: name of the network.
        seed: seed of the run.
        images: the number of test images over which the scores are averaged.
        stages: one figure for each stage.
    """

    model: str
    seed: int
    images: int
    stages: list[Shown]


@dataclass(frozen=True)
class Curve:
    """The columns of metrics.csv that one figure plots over the epochs.

    Args:
        title: the title of the figure.
        trained: the column for the training images; None if there is none.
        evaluated: the column for the held-out images.
        log: whether the vertical axis is logarithmic.
    """

    title: str
    trained: str | None
    evaluated: str
    log: bool = False


def curves(task: Task, runs: Mapping[str, Sequence[Path]]) -> list[Shown]:
    """Plots the loss, the headline metric and the other training metrics over the epochs.

    Args:
        task: the task of the runs.
        runs: the folders of the runs of each network, by the name of the network.
    """
    wanted = [Curve("Loss", "train_loss", "eval_loss", log=True)]
    for metric in dict.fromkeys((task.headline, *task.train_metrics)):
        trained = f"train_{metric.name}" if metric in task.train_metrics else None
        if metric in task.eval_metrics:
            wanted.append(Curve(sentence_case(metric.title), trained, f"eval_{metric.name}"))
    return [_draw(curve, runs) for curve in wanted]


def _draw(curve: Curve, runs: Mapping[str, Sequence[Path]]) -> Shown:
    figure = Figure(figsize=(5.4, 3.7), layout="constrained")
    axes = figure.subplots()
    for index, (model, folders) in enumerate(runs.items()):
        histories = [read_metrics(folder) for folder in folders]
        epochs = [row["epoch"] for row in histories[0]]
        for key, style, images in ((curve.trained, ":", "training"), (curve.evaluated, "-", "held out")):
            if key is None:
                continue
            for history in histories:
                values = [row[key] for row in history]
                axes.plot(epochs, values, style, color=colour(index), alpha=0.35, linewidth=0.9)
            means = [sum(rows[i][key] for rows in histories) / len(histories) for i in range(len(epochs))]
            marker = "o" if len(epochs) == 1 else None
            label = f"{model}, {images}"
            axes.plot(epochs, means, style, color=colour(index), linewidth=1.9, label=label, marker=marker)
    axes.set_xlabel("epoch")
    axes.set_title(curve.title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    if curve.log:
        axes.set_yscale("log")
    axes.legend(fontsize=7.5, frameon=False)
    return Shown(f"{curve.title} over epochs", svg(figure))


def attention(runs: Mapping[str, Sequence[Path]], images: Images | None) -> list[Attention]:
    """Plots the attention scores of the first run of each network with layer attention.

    Args:
        runs: the folders of the runs of each network, by the name of the network.
        images: the test images; None if they cannot be opened by index.
    """
    return [] if images is None else [shown for folders in runs.values() for shown in _attention(folders[0], images)]


def _attention(folder: Path, images: Images) -> list[Attention]:
    trained = TrainedNetwork(folder, device=torch.device("cpu"))
    if not attached_mechanisms(trained.network):
        return []
    transform, bad = trained.transform.evaluation(), read_summary(folder)["bad_images"]
    readable = [index for index in range(len(images)) if images.name(index) not in bad]
    chosen = [readable[i] for i in spread(len(readable), SCORED_IMAGES)]
    pixels = torch.stack([torch.as_tensor(transform(images.open(index))) for index in chosen])
    try:
        stages = layer_scores(trained.network, trained.batch_transform.normalize(pixels))
    except ValueError:  # a variant of the mechanism without scores
        return []
    model = trained.recipe.model
    figures = [
        Shown(f"Which layer of {model} reads which, {stage.name}", svg(plot_layer_scores([stage], title="")))
        for stage in stages
    ]
    return [Attention(model, trained.recipe.seed, len(chosen), figures)]
