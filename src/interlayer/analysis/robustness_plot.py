"""The plot of a robustness evaluation: a metric by the strength of each perturbation."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..tasks import Metric
from .robustness import PerturbedScore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 4  # number of panels side by side
PANEL = (3.0, 2.7)  # inches of a panel
LETTERS = 11  # letters of the legend in an inch


@dataclass(frozen=True)
class RobustnessPanel:
    """The scores of several networks under one perturbation.

    Args:
        title: the name of the perturbation.
        unit: what a strength is.
        strengths: the strengths, in the order of the scores.
        scores: for each network, by its name, the score at each strength.
    """

    title: str
    unit: str
    strengths: Sequence[float]
    scores: Mapping[str, Sequence[PerturbedScore]]


def plot_robustness(
    panels: Sequence[RobustnessPanel],
    unperturbed: Mapping[str, PerturbedScore],
    metric: Metric,
    *,
    colors: Sequence[str] = ("C0", "C1", "C2", "C3", "C4", "C5"),
) -> Figure:
    """Plots the metric by the strength of each perturbation, one panel each, with intervals as error bars.

    Strengths are evenly spaced, because they have different scales. The value without perturbation is at the left of
    every panel, and panels share the vertical axis.

    Args:
        panels: the scores under each perturbation.
        unperturbed: the score of each network without perturbation.
        metric: the metric of the scores.
        colors: the colors of the networks, in their order.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    if not panels:
        raise ValueError("there are no perturbations to plot")
    lines = math.ceil(len(panels) / COLUMNS)
    columns = math.ceil(len(panels) / lines)
    size = (max(PANEL[0] * columns + 0.6, 4.4), PANEL[1] * lines + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for axes, panel in zip(grid.flatten(), panels, strict=False):
        for index, (name, scores) in enumerate(panel.scores.items()):
            every = [unperturbed[name], *scores]
            shift = 0.06 * (index - (len(panel.scores) - 1) / 2)  # error bars of several networks do not overlap
            places = [place + shift for place in range(len(every))]
            axes.errorbar(
                places, [score.mean for score in every], [score.half_width or 0.0 for score in every],
                color=colors[index % len(colors)], marker="o", markersize=3.5, linewidth=1.5, capsize=2.5, label=name,
            )  # fmt: skip
        ticks = ["none", *(f"{strength:g}" for strength in panel.strengths)]
        axes.set_xticks(range(len(ticks)), ticks, fontsize=8.5)
        axes.set_xlabel(panel.unit, fontsize=8.5)
        axes.set_title(panel.title, fontsize=9.5)
        axes.grid(alpha=0.25)
        axes.set_xlim(-0.35, len(panel.strengths) + 0.35)
        if metric.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in grid.flatten()[len(panels) :]:
        axes.remove()
    for row in grid:
        row[0].set_ylabel(metric.title, fontsize=9)
    if metric.percent:
        highest = max(score.mean for score in unperturbed.values())
        grid[0, 0].set_ylim(0, min(1.03, max(1.2 * highest, 0.05)))  # an interval of few values can exceed 100%
    handles, labels = grid[0, 0].get_legend_handles_labels()
    if len(labels) > 1:
        letters = int(size[0] * LETTERS)
        side_by_side = len(labels) == 2 and sum(map(len, labels)) < letters - 10
        wrapped = [textwrap.fill(label, letters) for label in labels]
        figure.legend(handles, wrapped, loc="outside lower center", ncols=2 if side_by_side else 1, fontsize=8.5)
    return figure
