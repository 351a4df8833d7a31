"""Plots of cost: FLOPs by the size of the image, time and memory by depth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .depth import DepthCost, depth_curves, depth_exponents
from .flops_by_size import FlopsBySize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "osD^v"
LABELS = 14  # labels for which an axis has space


def plot_flops_by_size(
    curves: Sequence[FlopsBySize], *, title: str = "Multiply-adds by the size of the image"
) -> Figure:
    """Plots the multiply-adds of networks by the size of the image, and those that mechanisms add (MRLA, Figure 5).

    The horizontal axis is linear in the number of pixels and labeled with the sizes, so that a straight line means
    linear in the number of pixels. Plain backbones are dashed.

    Args:
        curves: the result of `flops_by_size`.
        title: title of the figure.
    """
    from matplotlib.figure import Figure

    if not curves:
        raise ValueError("there are no networks to plot")
    extended = [curve for curve in curves if curve.added is not None]
    figure = Figure(figsize=(9.2 if extended else 5.0, 3.8), layout="constrained")
    figure.suptitle(title, fontsize=10)
    total, *others = figure.subplots(1, 2 if extended else 1, squeeze=False)[0]
    styles = {curve.name: _style(number) for number, curve in enumerate(curves)}
    drawn = {curve.name for curve in curves}
    for curve in curves:
        pixels = [size**2 for size in curve.sizes]
        total.plot(pixels, _in(1e9, curve.flops), "-", label=curve.name, **styles[curve.name])
        if curve.plain is not None and curve.backbone not in drawn:
            drawn.add(curve.backbone)
            total.plot(pixels, _in(1e9, curve.plain), "--", color="0.3", linewidth=1, label=curve.backbone)
    total.set_ylabel("billion multiply-adds", fontsize=9)
    for axes in others:
        for curve in extended:
            assert curve.added is not None
            label = curve.name + (f", R² = {curve.line.r_squared:.4f}" if curve.line and len(curve.sizes) > 2 else "")
            pixels = [size**2 for size in curve.sizes]
            axes.plot(pixels, _in(1e6, curve.added), linestyle="none", label=label, **styles[curve.name])
            if curve.line is not None:
                fitted = [curve.line.at(count) for count in (pixels[0], pixels[-1])]
                axes.plot([pixels[0], pixels[-1]], _in(1e6, fitted), color=styles[curve.name]["color"], linewidth=1)
        axes.set_ylabel("million multiply-adds that the mechanism adds", fontsize=9)
    for axes in (total, *others):
        _sizes_axis(axes, sorted({size for curve in curves for size in curve.sizes}))
        lines = len(axes.get_legend_handles_labels()[0])
        axes.set_ylim(0, (1.05 + 0.08 * lines) * axes.get_ylim()[1])  # space for the legend
        axes.legend(fontsize=8, loc="upper left")
    return figure


def plot_depth(costs: Sequence[DepthCost], *, title: str = "A training step by depth") -> Figure:
    """Plots the memory of a training step and its time per block as functions of the number of blocks of a stage.

    The time per block does not depend on depth if the time is linear in it. The legends have the exponents of T.

    Args:
        costs: the result of `depth_costs`.
        title: title of the figure.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    curves = depth_curves(costs)
    if not curves:
        raise ValueError("there are no measurements to plot")
    unit, factor = ("GiB", 2**30) if max(cost.memory for cost in costs if cost.fits) > 2**30 else ("MiB", 2**20)
    figure = Figure(figsize=(9.2, 3.8), layout="constrained")
    figure.suptitle(title, fontsize=10)
    memory, seconds = figure.subplots(1, 2)
    for number, (name, curve) in enumerate(curves.items()):
        depths, style = [cost.blocks for cost in curve], _style(number)
        of_time, of_memory = (_power(value) for value in depth_exponents(curve))
        memory.plot(depths, _in(factor, [cost.memory for cost in curve]), label=f"{name}{of_memory}", **style)
        per_block = [1e3 * cost.seconds / cost.blocks for cost in curve]
        seconds.plot(depths, per_block, label=f"{name}{of_time}", **style)
    depths = sorted({cost.blocks for cost in costs})
    for axes, label in ((memory, f"activations of a step [{unit}]"), (seconds, "time of a step per block [ms]")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(depths, [str(depth) for depth in depths], minor=False)
        axes.set_xlabel("blocks of the stage, T", fontsize=9)
        axes.set_ylabel(label, fontsize=9)
        axes.grid(alpha=0.25)
    memory.set_yscale("log", base=2)
    memory.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    low, high = memory.get_ylim()
    memory.set_ylim(low, high * 2 ** (0.6 * len(curves)))  # space for the legends
    seconds.set_ylim(0, (1.2 + 0.08 * len(curves)) * seconds.get_ylim()[1])
    memory.legend(title="memory", fontsize=8, title_fontsize=8, loc="upper left")
    seconds.legend(title="time of the whole step", fontsize=8, title_fontsize=8, loc="upper left")
    return figure


def _power(value: float) -> str:
    return "" if math.isnan(value) else f", $T^{{{value:.2f}}}$"


def _style(number: int) -> dict[str, Any]:
    """Returns color and marker of a curve: equal values of several networks remain visible."""
    size = 5 + 2 * (number % len(MARKERS))
    return {
        "color": f"C{number % 10}", "marker": MARKERS[number % len(MARKERS)], "markersize": size,
        "markerfacecolor": "none", "linewidth": 1.2,
    }  # fmt: skip


def _in(unit: float, values: Sequence[float]) -> list[float]:
    return [value / unit for value in values]


def _sizes_axis(axes: Any, sizes: Sequence[int]) -> None:
    """Labels an axis that is linear in the number of pixels with sizes that have enough space."""
    shown: list[int] = []
    for size in reversed(sizes):
        if not shown or shown[-1] ** 2 - size**2 >= sizes[-1] ** 2 / LABELS:
            shown.append(size)
    axes.set_xticks([size**2 for size in shown], [f"{size}²" for size in shown], fontsize=8)
    axes.set_xlim(0, 1.05 * sizes[-1] ** 2)
    axes.set_xlabel("image size in pixels; the axis is linear in the number of pixels", fontsize=9)
    axes.grid(alpha=0.25)
