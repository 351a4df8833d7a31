"""The figures of a report: training curves, contribution of mechanisms, scores between layers, confusion matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, MaxNLocator, PercentFormatter

from ..analysis import Contribution, contribution, layer_scores, plot_layer_scores
from ..analysis.plots import block_labels
from ..experiments import Comparison, TrainedNetwork, some_test_images
from ..experiments.statistics import interval_half_width
from ..experiments.table import network_titles
from ..hosts import attached_mechanisms
from ..tasks import Matrix, Plot, Task
from ..training.data import Images
from ..training.logs import read_metrics
from ..training.summary import read_summary
from .rendering import colour, sentence_case, svg

SEEDS_OF_BANDS = 3  # minimum number of seeds for the interval of a curve: that of two is far too wide
BLOCKS_BESIDE = 16  # maximum number of blocks of figures that stand beside each other
LONGEST_NAME = 24  # number of letters of a class name in a confusion matrix


@dataclass(frozen=True)
class Shown:
    """A figure on a page.

    Args:
        alt: a description of the figure.
        source: the image as a data URI.
        width: the width on the page in pixels, if it is not that of the image.
    """

    alt: str
    source: str
    width: int | None = None


@dataclass(frozen=True)
class Attention:
    """The attention scores between the layers of a network.

    Args:
        model: name of the network.
        seed: seed of the run.
        images: the number of test images over which the scores are averaged.
        figure: the scores of all stages.
        contribution: how much the mechanism contributes to the network.
    """

    model: str
    seed: int
    images: int
    figure: Shown
    contribution: str


@dataclass(frozen=True)
class MechanismEffect:
    """What the mechanisms of a network contribute to it.

    Args:
        model: name of the network.
        contribution: the measured contribution.
        figure: the ratio of every block.
    """

    model: str
    contribution: Contribution
    figure: Shown

    @property
    def wide(self) -> bool:
        """Whether the figure needs the whole width of a page."""
        return len(self.contribution.blocks) > BLOCKS_BESIDE

    @property
    def images(self) -> str:
        """The images over which the ratios are averaged."""
        runs = self.contribution.runs
        images = f"{self.contribution.ratio_images // runs} test images"
        return f"{images} and {runs} seeds" if runs > 1 else images


@dataclass(frozen=True)
class Curve:
    """The columns of metrics.csv that one figure plots over the epochs.

    Args:
        title: the title of the figure.
        trained: the column for the training images; None if there is none.
        evaluated: the column for the held-out images; None if there is none.
        log: whether the vertical axis is logarithmic.
        percent: whether the values are fractions, which are shown as percentages.
    """

    title: str
    trained: str | None
    evaluated: str | None
    log: bool = False
    percent: bool = False


def curves(task: Task, runs: Mapping[str, Sequence[Path]]) -> list[Shown]:
    """Plots the loss, the headline metric and the other training metrics over the epochs.

    Args:
        task: the task of the runs.
        runs: the folders of the runs of each network, by the name of the network.
    """
    wanted = [Curve("Loss", "train_loss", "eval_loss" if task.evaluates_loss else None, log=True)]
    for metric in dict.fromkeys((task.headline, *task.train_metrics)):
        trained = f"train_{metric.name}" if metric in task.train_metrics else None
        if metric in task.eval_metrics:
            wanted.append(Curve(sentence_case(metric.title), trained, f"eval_{metric.name}", percent=metric.percent))
    return [_draw(curve, runs) for curve in wanted]


def _draw(curve: Curve, runs: Mapping[str, Sequence[Path]]) -> Shown:
    figure = Figure(figsize=(5.4, 3.7), layout="constrained")
    axes = figure.subplots()
    if curve.log:  # before anything is drawn: the limits of a linear axis may not be positive
        axes.set_yscale("log")
    bands: list[tuple[int, list[float], np.ndarray, np.ndarray]] = []
    for index, (model, folders) in enumerate(runs.items()):
        all_rows = [read_metrics(folder) for folder in folders]
        for key, style in ((curve.trained, ":"), (curve.evaluated, "-")):
            if key is None:
                continue
            histories = [[row for row in rows if not math.isnan(row[key])] for rows in all_rows]  # see eval_every
            epochs = [row["epoch"] for row in histories[0]]
            for history in histories:
                values = [row[key] for row in history]
                axes.plot(epochs, values, style, color=colour(index), alpha=0.35, linewidth=0.9)
            means = [sum(rows[i][key] for rows in histories) / len(histories) for i in range(len(epochs))]
            marker = "o" if len(epochs) == 1 else None
            label = model if key == (curve.evaluated or curve.trained) else None
            axes.plot(epochs, means, style, color=colour(index), linewidth=1.9, label=label, marker=marker)
            if key == curve.evaluated and len(histories) >= SEEDS_OF_BANDS and not curve.log:
                widths = [interval_half_width([rows[i][key] for rows in histories]) for i in range(len(epochs))]
                bands.append((index, epochs, np.array(means), np.array(widths)))
    limits = axes.get_ylim()
    for index, epochs, middle, half in bands:
        axes.fill_between(epochs, middle - half, middle + half, color=colour(index), alpha=0.15, linewidth=0)
    axes.set_ylim(limits)  # an interval of few seeds can be far wider than the curves
    axes.set_xlabel("epoch")
    axes.set_title(curve.title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    if curve.log:
        axes.yaxis.set_major_formatter(_PlainLogFormatter())
        axes.yaxis.set_minor_formatter(_PlainLogFormatter())
    if curve.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(fontsize=7.5, frameon=False)
    return Shown(f"{curve.title} over epochs", svg(figure))


class _PlainLogFormatter(LogFormatterSciNotation):
    """Labels the ticks that matplotlib would label, as 0.6 instead of 6 x 10^-1."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:.3g}" if super().__call__(x, pos) else ""


def costs(comparison: Comparison) -> Shown:
    """Plots the headline metric of every network against its training time and against its memory."""
    metric = comparison.metric
    figure = Figure(figsize=(10.4, 3.6), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2, sharey=True)
    for axes, title, unit in ((time_axes, "training time of a run", "s"), (memory_axes, "memory of a step", "MiB")):
        for index, result in enumerate(comparison.results):
            cost = result.cost.training_seconds if axes is time_axes else result.cost.memory / 2**20
            deviation = 0.0 if math.isnan(result.spread) else result.spread
            axes.errorbar(
                cost, result.mean, deviation, fmt="s" if result.control_of else "o", color=colour(index), capsize=3,
                markersize=7, label=network_titles(comparison)[index],
            )  # fmt: skip
        axes.set_xlim(0, 1.08 * axes.get_xlim()[1])
        axes.set_xlabel(f"{title} ({unit})")
        axes.grid(alpha=0.25)
        if metric.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    time_axes.set_ylabel(metric.title)
    figure.legend(*time_axes.get_legend_handles_labels(), loc="outside right center", fontsize=7.5, frameon=False)
    return Shown(f"{sentence_case(metric.title)} against training time and memory", svg(figure))


def contributions(records: Mapping[str, Contribution | None]) -> list[MechanismEffect]:
    """Plots the contribution of the mechanisms to every block, for each network that has one.

    Args:
        records: the measured contribution of each network, by the name of the network; None if it has no mechanism.
    """
    return [
        MechanismEffect(model, record, _contribution(model, record, colour(index)))
        for index, (model, record) in enumerate(records.items())
        if record is not None
    ]


def _contribution(model: str, record: Contribution, color: str) -> Shown:
    figure = contribution_figure(record, color)
    return Shown(f"Contribution of the mechanism to every block of {model}", svg(figure))


def contribution_figure(record: Contribution, color: str) -> Figure:
    """Plots the contribution of the mechanisms to every block."""
    several = len(record.mechanisms) > 1
    blocks = block_labels([row.block for row in record.blocks])
    names = [f"{b} ({row.mechanism})" if several else b for b, row in zip(blocks, record.blocks, strict=True)]
    ratios = [row.ratio for row in record.blocks]
    figure = Figure(
        figsize=(max(4.0, 0.26 * len(names) + 1.2), 2.6 + 0.065 * max(map(len, names))), layout="constrained"
    )
    axes = figure.subplots()
    axes.bar(range(len(names)), ratios, color=color, width=0.75)
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7.5)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(0, max(1.08 * max(ratios), 0.01))  # a mechanism that does nothing is not magnified
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("change of the block's output", fontsize=9)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    return figure


def confusion(matrix: Matrix) -> Shown:
    """Plots counts by true and predicted class. Colors are shares of a row, so that every class counts alike."""
    counts = np.array(matrix.counts, dtype=float)
    totals = counts.sum(1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)
    names = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in matrix.classes]
    size = len(names)
    cell = 0.62 if size <= 12 else 0.38  # inches
    margin = 0.9 + 0.08 * max(map(len, names))
    figure = Figure(figsize=(cell * size + margin + 0.9, cell * size + margin), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues")
    axes.set_xticks(range(size), names, rotation=90, fontsize=8.5)
    axes.set_yticks(range(size), names, fontsize=8.5)
    axes.set_xlabel(matrix.columns)
    axes.set_ylabel(matrix.rows)
    axes.set_xticks(np.arange(-0.5, size), minor=True)
    axes.set_yticks(np.arange(-0.5, size), minor=True)
    axes.grid(which="minor", color="#e6eaf0", linewidth=0.8)
    axes.tick_params(which="both", length=0)
    for row, column in zip(*counts.nonzero(), strict=True):
        share, count = shares[row, column], _short(int(counts[row, column]))
        text = f"{count}\n{share:.0%}" if size <= 12 else count
        ink = "white" if share > 0.55 else "#1d2430"
        axes.text(column, row, text, ha="center", va="center", fontsize=8 if size <= 12 else 7, color=ink)
    bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=30, format=PercentFormatter(1.0))
    bar.set_label(f"share of the {matrix.rows}", fontsize=9)
    return Shown(f"Confusion matrix of {size} classes", svg(figure))


def _short(count: int) -> str:
    """Formats a count so that it fits into a cell: 123,456 or 12.3M."""
    return f"{count:,}" if count < 1_000_000 else f"{count / 1_000_000:.1f}M"


def plot(content: Plot) -> Shown:
    """Plots lines whose axes go from 0 to 1."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for index, line in enumerate(content.lines):
        axes.plot(line.x, line.y, color=line.color or colour(index), linewidth=1.7, label=line.name)
    axes.set_xlim(0, 1.01)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(content.x)
    axes.set_ylabel(content.y)
    axes.grid(alpha=0.25)
    if content.lines:
        axes.legend(loc="lower left", fontsize=8.5)
    return Shown(content.title, svg(figure))


def attention(
    runs: Mapping[str, Sequence[Path]], records: Mapping[str, Contribution | None], images: Images | None
) -> list[Attention]:
    """Plots the attention scores of the first run of each network with layer attention.

    Args:
        runs: the folders of the runs of each network, by the name of the network.
        records: the measured contribution of each network; None if a run does not hold it.
        images: the test images; None if they cannot be opened by index.
    """
    if images is None:
        return []
    return [shown for model, folders in runs.items() for shown in _attention(folders[0], records[model], images)]


def _attention(folder: Path, record: Contribution | None, images: Images) -> list[Attention]:
    trained = TrainedNetwork(folder, device=torch.device("cpu"))
    if not attached_mechanisms(trained.network):
        return []
    pixels = some_test_images(trained, images, read_summary(folder)["bad_images"]).inputs
    try:
        stages = layer_scores(trained.task.backbone(trained.network), pixels)
    except ValueError:  # a variant of the mechanism without scores
        return []
    model = trained.recipe.model
    if record is None:  # a run of an earlier version
        record = contribution(trained.network, pixels)
    figure = Shown(f"Which layer of {model} reads which", svg(plot_layer_scores(stages, title="")))
    text = f"{record.change}; {record.sentence}" if record.changed is not None or record.metric else record.change
    return [Attention(model, trained.recipe.seed, len(pixels), figure, text)]
