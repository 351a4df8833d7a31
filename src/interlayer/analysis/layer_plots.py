"""Plots of measures of consecutive layers: similarity of their queries, divergence of their scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .plots import MOST_LABELS, block_labels
from .queries import StageQueries, random_similarity
from .sharing import StageSharing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 40
ROW = 3.1  # inches of the panels of one network
LAYER = 0.22  # inches of one layer on an axis, within limits
WIDE = 50  # ratio of the largest divergence to the threshold above which the axis is logarithmic
SPREAD = (0.1, 0.9)  # quantiles of the bars of a layer


def plot_query_similarity(
    networks: Mapping[str, Sequence[StageQueries]], *, title: str = "Are the queries of consecutive layers alike?"
) -> Figure:
    """Plots a histogram of the similarities of queries (MRLA, Figure 2b) and their mean by layer, a row per network.

    The histogram contains every image, head and layer. A dashed line is the mean that random directions would have. The
    bars of a layer extend from the 10th to the 90th percentile over images and heads.

    Args:
        networks: the result of `query_similarities` of each network, by its name.
        title: title of the figure.
    """
    if not networks:
        raise ValueError("there are no networks to plot")
    most = max(sum(len(stage.blocks) for stage in stages) for stages in networks.values())
    width = _width(most)
    figure, grid = _rows(len(networks), (3.6, width), title)
    for (left, right), (name, stages) in zip(grid, networks.items(), strict=True):
        values = torch.cat([stage.similarities.flatten() for stage in stages])
        left.hist(values.numpy(), bins=BINS, range=(0, 1), weights=[100 / len(values)] * len(values), color="C0")
        chance = _mean_chance(stages)
        for axes in (left, right):
            draw = axes.axvline if axes is left else axes.axhline
            draw(chance, color="0.4", linestyle="--", linewidth=1, label=f"random directions, mean {chance:.2f}")
        left.axvline(float(values.mean()), color="k", linewidth=1.2, label=f"mean {float(values.mean()):.2f}")
        left.set_xlim(0, 1)
        left.set_ylim(top=1.3 * left.get_ylim()[1])  # space for the legend
        left.set_xlabel("|cosine similarity| with the query before", fontsize=9)
        left.set_ylabel("% of queries", fontsize=9)
        left.set_title(name, fontsize=9.5)
        left.legend(fontsize=8)
        _layers(right, [stage.blocks for stage in stages])
        position = 0
        for number, stage in enumerate(stages):
            by_layer = stage.similarities.flatten(0, 1)
            low, high = (torch.quantile(by_layer, quantile, dim=0) for quantile in SPREAD)
            means, places = stage.means, range(position, position + len(stage.blocks))
            error = torch.stack((means - low, high - means)).clamp(min=0)
            right.errorbar(places, means, error, color=f"C{number % 10}", marker="o", markersize=4, capsize=2)
            position += len(stage.blocks)
        right.set_ylim(0, 1.03)
        right.set_ylabel("mean |cosine similarity|", fontsize=9)
        right.set_title("by layer; bars: 10% to 90%", fontsize=9.5)
    return figure


def plot_score_sharing(
    networks: Mapping[str, Sequence[StageSharing]],
    *,
    threshold: float | None = None,
    title: str = "Where do consecutive layers attend alike?",
) -> Figure:
    """Plots the divergence of the scores of each layer and the layer before, a row per network.

    Args:
        networks: the result of `score_sharing` of each network, by its name.
        threshold: a divergence in nats, drawn as a line; layers that do not exceed it are filled. The axis is
            logarithmic if it is much smaller than the largest divergence.
        title: title of the figure.
    """
    if not networks:
        raise ValueError("there are no networks to plot")
    most = max(sum(len(stage.blocks) for stage in stages) for stages in networks.values())
    figure, grid = _rows(len(networks), (max(_width(most), 4.6),), title)
    for (axes,), (name, stages) in zip(grid, networks.items(), strict=True):
        _layers(axes, [stage.blocks for stage in stages])
        position = 0
        for number, stage in enumerate(stages):
            for divergence in stage.divergences:
                filled = threshold is None or divergence <= threshold
                color = f"C{number % 10}"
                axes.bar(
                    position, divergence, width=0.75, color=color if filled else "none", edgecolor=color, linewidth=1.2
                )
                position += 1
        if threshold is not None:
            label = f"threshold {threshold:g}: filled layers do not exceed it"
            axes.axhline(threshold, color="k", linestyle="--", linewidth=1, label=label)
            axes.legend(fontsize=8, loc="upper right")
            values = [divergence for stage in stages for divergence in stage.divergences]
            if 0 < threshold < max(values) / WIDE:  # otherwise the line would lie on the axis
                axes.set_yscale("log")
                axes.set_ylim(min([threshold, *(value for value in values if value > 0)]) / 2, 8 * max(values))
            else:
                axes.set_ylim(0, 1.2 * axes.get_ylim()[1])  # space for the legend
        axes.set_ylabel("KL divergence from the scores\nof the layer before [nats]", fontsize=9)
        axes.set_title(name, fontsize=9.5)
    return figure


def _width(layers: int) -> float:
    """Returns the inches of a panel with so many layers."""
    return min(max(LAYER * layers + 1.0, 3.0), 8.0)


def _rows(rows: int, widths: Sequence[float], title: str) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(sum(widths) + 1.2, ROW * rows + 0.4), layout="constrained")
    figure.suptitle(title, fontsize=10)
    grid = figure.subplots(rows, len(widths), squeeze=False, width_ratios=widths)
    return figure, grid


def _layers(axes: Any, stages: Sequence[Sequence[str]]) -> None:
    """Labels the horizontal axis with layers, and separates stages by lines."""
    labels = block_labels([block for blocks in stages for block in blocks])
    shown = range(0, len(labels), math.ceil(len(labels) / (2 * MOST_LABELS)))
    axes.set_xticks(list(shown), [labels[place] for place in shown], rotation=90, fontsize=8)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.grid(axis="y", alpha=0.25)
    position = 0
    for blocks in stages[:-1]:
        position += len(blocks)
        axes.axvline(position - 0.5, color="0.8", linewidth=0.8)


def _mean_chance(stages: Sequence[StageQueries]) -> float:
    """Returns the mean similarity of random directions, over the heads of all stages."""
    sizes = [stage.similarities.numel() for stage in stages]
    found = [random_similarity(stage.channels) * size for stage, size in zip(stages, sizes, strict=True)]
    return sum(found) / sum(sizes)
