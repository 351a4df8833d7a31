"""Plots of the results of the analysis. Every function returns a matplotlib Figure and opens no window."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .scores import StageScores
from .shared_weights import SharedWeights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 4  # number of stages side by side
PANEL = 2.6  # inches of a heatmap
VISIBLE = 0.01  # part of the color scale below which a weight is not distinguished from zero
MOST_LABELS = 16  # number of layers that are labeled on an axis
WRAPPERS = r"^(?:(?:backbone|body|network|model|module)\.(?!\d))+"  # they hold a whole network: detectors, DDP
HEADS = 8  # number of heads side by side
SMALL = 1.25  # inches of the heatmap of a head
DIVISIONS = 8  # pixels along the side of a cell of such a heatmap


def plot_layer_scores(
    stages: Sequence[StageScores],
    *,
    head: int | Literal["all"] | None = None,
    title: str = "Which layer reads which",
    note: str = "",
) -> Figure:
    """Plots a heatmap of the scores between layers for each stage, averaged over images (MRLA, Figure 1a).

    All stages share one color scale, and layers are labeled with the names of their blocks. Stages of a single layer,
    which reads only itself, are left out if there are longer ones.

    A cell shows the mean weight over images, heads and channels. Where weights of both signs would cancel, the cell is
    divided: its upper left half shows the mean of the positive weights, mean(w+), and its lower right half that of the
    negative weights, -mean(w-). See `StageScores.parts`.

    Args:
        stages: the result of `interlayer.layer_scores`.
        head: index of the head to plot; the mean over heads if None; "all" for a small heatmap of every head.
        title: title of the figure.
        note: a line below the title, such as the sentence of `interlayer.contribution`.
    """
    from matplotlib.figure import Figure

    if not stages:
        raise ValueError("there are no stages to plot")
    fewest = min(stage.scores.shape[1] for stage in stages)
    if isinstance(head, int) and not 0 <= head < fewest:
        raise ValueError(f"head must be from 0 to {fewest - 1}, got {head}")
    stages = [stage for stage in stages if len(stage.blocks) > 1] or stages
    if head == "all":
        return plot_every_head(stages, title=title, note=note)
    parts = [tuple(part.cpu() for part in stage.parts(head)) for stage in stages]
    largest = max(*(float(part.max()) for pair in parts for part in pair), 1e-12)
    signed = any(bool(negative.max() > 0) for _, negative in parts)
    lines = math.ceil(len(stages) / COLUMNS)
    columns = math.ceil(len(stages) / lines)
    longest = max(len(label) for stage in stages for label in block_labels(stage.blocks))
    side = PANEL + 0.075 * longest  # inches of one panel with its labels
    figure = Figure(figsize=(side * columns + 1.2, side * lines + 0.9), layout="constrained")
    notes = textwrap.wrap(note, int(13 * side * columns))
    figure.suptitle("\n".join(text for text in (title, *notes) if text), fontsize=10)
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    colors = {"vmin": -largest if signed else 0.0, "vmax": largest, "cmap": "RdBu_r" if signed else "viridis"}
    for axes, stage, (positive, negative) in zip(grid, stages, parts, strict=False):
        image = _heatmap(axes, stage, positive, negative, colors)
    for axes in grid[len(stages) :]:
        axes.remove()
    if any(bool((torch.minimum(*pair) > VISIBLE * largest).any()) for pair in parts):
        figure.supxlabel("divided cells: mean of the positive and of the negative weights", fontsize=8)
    figure.colorbar(image, ax=list(grid[: len(stages)]), shrink=0.8, pad=0.02, label="mean weight")
    return figure


def plot_every_head(stages: Sequence[StageScores], *, title: str, note: str = "") -> Figure:
    """Plots a small heatmap of the scores between layers for each head of each stage, averaged over images.

    A cell shows the same as one of `plot_layer_scores`, without its number. Heads of a stage begin a new line.

    Args:
        stages: the result of `interlayer.layer_scores`.
        title: title of the figure.
        note: a line below the title.
    """
    from matplotlib.figure import Figure

    columns = min(HEADS, max(stage.scores.shape[1] for stage in stages))
    lines = [math.ceil(stage.scores.shape[1] / columns) for stage in stages]
    parts = [[tuple(p.cpu() for p in stage.parts(head)) for head in range(stage.scores.shape[1])] for stage in stages]
    largest = max(*(float(part.max()) for heads in parts for pair in heads for part in pair), 1e-12)
    signed = any(bool(negative.max() > 0) for heads in parts for _, negative in heads)
    colors = {"vmin": -largest if signed else 0.0, "vmax": largest, "cmap": "RdBu_r" if signed else "viridis"}
    figure = Figure(figsize=(max(SMALL * columns + 1.6, 4.5), SMALL * sum(lines) + 1.0), layout="constrained")
    notes = textwrap.wrap(note, int(13 * figure.get_figwidth()))
    figure.suptitle("\n".join(text for text in (title, *notes) if text), fontsize=10)
    grid = figure.subplots(sum(lines), columns, squeeze=False)
    line = 0
    for stage, heads, wanted in zip(stages, parts, lines, strict=True):
        places = grid[line : line + wanted].flatten()
        for number, (axes, (positive, negative)) in enumerate(zip(places, heads, strict=False)):
            size = len(positive)
            shown = _divided_cells(positive, negative, largest)
            image = axes.imshow(shown.numpy(), extent=(-0.5, size - 0.5, size - 0.5, -0.5), **colors)
            axes.set_title(f"head {number}", fontsize=7, loc="left")
            axes.set_xticks([])
            axes.set_yticks([])
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        for axes in places[len(heads) :]:
            axes.remove()
        places[0].set_ylabel(f"{stage.name}\nreading layer", fontsize=7)
        places[0].set_xlabel("layer read", fontsize=7)
        line += wanted
    if any(bool((torch.minimum(*pair) > VISIBLE * largest).any()) for heads in parts for pair in heads):
        figure.supxlabel("divided cells: mean of the positive and of the negative weights", fontsize=8)
    shown_axes = [axes for axes in figure.axes if axes.images]
    figure.colorbar(image, ax=shown_axes, shrink=min(0.8, 4 / len(grid) + 0.2), pad=0.02, label="mean weight")
    return figure


def _divided_cells(positive: Tensor, negative: Tensor, largest: float) -> Tensor:
    """Returns an image of the lower triangle in which every cell has several pixels, and a divided one two values."""
    size = len(positive)
    pixels = torch.arange(DIVISIONS)
    above = (pixels[:, None] + pixels[None, :]) < DIVISIONS - 1  # the upper left half of a cell
    cells = (positive - negative)[:, :, None, None].expand(-1, -1, DIVISIONS, DIVISIONS).clone()
    divided = torch.minimum(positive, negative) > VISIBLE * largest
    halves = torch.where(above, positive[..., None, None], -negative[..., None, None])
    cells[divided] = halves[divided]
    cells[positive.new_ones(size, size).triu(1).bool()] = float("nan")
    return cells.permute(0, 2, 1, 3).flatten(2, 3).flatten(0, 1)


def _heatmap(axes: Any, stage: StageScores, positive: Tensor, negative: Tensor, colors: dict[str, Any]) -> Any:
    """Draws one stage and returns its image, which has the color scale."""
    size, scores = len(positive), positive - negative
    shown = scores.masked_fill(scores.new_ones(size, size).triu(1).bool(), float("nan"))
    image = axes.imshow(shown.numpy(), origin="upper", **colors)
    labels = block_labels(stage.blocks)
    layers = range(0, size, math.ceil(size / MOST_LABELS))
    axes.set_xticks(list(layers), [labels[layer] for layer in layers], rotation=90)
    axes.set_yticks(list(layers), [labels[layer] for layer in layers])
    axes.tick_params(labelsize=8, length=2)
    axes.set_xlabel("layer read", fontsize=9)
    axes.set_ylabel("reading layer", fontsize=9)
    axes.set_title(stage.name, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for t in range(size):
        for s in range(t + 1):
            _draw_cell(axes, image, (t, s), float(positive[t, s]), float(negative[t, s]), layers=size)
    return image


def _draw_cell(axes: Any, image: Any, cell: tuple[int, int], positive: float, negative: float, *, layers: int) -> None:
    """Writes the value of a cell or, if it has weights of both signs, divides it and writes both values."""
    from matplotlib.patches import Polygon

    t, s = cell
    values, size = [(0.0, positive - negative)], 7.0  # offset from the center of the cell, and value; font size
    if _divided(positive, negative, image.norm.vmax):
        top, bottom, left, right = t - 0.5, t + 0.5, s - 0.5, s + 0.5
        for value, corner in ((positive, (left, top)), (-negative, (right, bottom))):
            color = image.cmap(image.norm(value))
            axes.add_patch(Polygon([corner, (right, top), (left, bottom)], facecolor=color, edgecolor="none"))
        values, size = [(-0.22, positive), (0.22, -negative)], 6.5 if layers <= 4 else 5.0
    for offset, value in values if layers <= 6 else ():
        red, green, blue, _ = image.cmap(image.norm(value))
        dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
        text = f"{value:.2f}".replace("-0.00", "0.00")
        axes.text(s + offset, t + offset, text, ha="center", va="center", fontsize=size, color="w" if dark else "k")


def _divided(positive: float, negative: float, largest: float) -> bool:
    """Whether a cell has weights of both signs that can be seen on a scale up to `largest`."""
    return min(positive, negative) > VISIBLE * largest


def block_labels(blocks: Sequence[str]) -> list[str]:
    """Returns the names of blocks without the modules that hold a whole network.

    >>> block_labels(["backbone.body.network.layer1.0", "module.blocks.0"])
    ['layer1.0', 'blocks.0']
    """
    return [re.sub(WRAPPERS, "", block) for block in blocks]


def plot_shared_weights(panels: Sequence[tuple[str, Sequence[SharedWeights]]]) -> Figure:
    """Plots the L1 norms of shared 1x1 weights with their exponential fits (RLA, Figure 2), one panel per network.

    Args:
        panels: for each network, how the weights are shared ("lag" or "ordinal") and the result of `shared_weights`.
    """
    from matplotlib.figure import Figure

    if not panels:
        raise ValueError("there are no networks to plot")
    figure = Figure(figsize=(4.6 * len(panels), 3.6), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (by, stages) in zip(grid, panels, strict=True):
        for number, stage in enumerate(stages):
            positions = range(1, len(stage.norms) + 1)
            color = f"C{number}"
            axes.plot(positions, stage.norms, "o", color=color, markersize=4)
            label = f"stage {stage.stage}, R² = {stage.r_squared:.2f}"
            axes.plot(positions, stage.fitted, "-", color=color, label=label)
        axes.set_title(f"shared by {by}", fontsize=10)
        axes.set_xlabel("lag" if by == "lag" else "layer" if by == "ordinal" else by)
        axes.legend(fontsize=8)
    highest = max(max((*stage.norms, *stage.fitted)) for _, stages in panels for stage in stages)
    grid[0].set_ylim(0, 1.06 * highest)  # the panels share the axis
    grid[0].set_ylabel("mean |weight|")
    return figure
