"""A metric as a function of the number of heads (CB, Figure 9): points with intervals, and their plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ..mechanisms import LayerAttention
from ..tasks import Metric

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class HeadsPoint:
    """The value of a metric for one number of heads.

    Args:
        heads: the number of heads of an attention layer, the mean over layers.
        mean: the mean of the metric over seeds.
        half_width: half the width of the confidence interval of the mean; None for a single seed.
        seeds: the number of seeds.
    """

    heads: float
    mean: float
    half_width: float | None = None
    seeds: int = 1


def attention_heads(network: nn.Module) -> float:
    """Returns the number of heads of the attention layers of a network, the mean over layers.

    Attention layers are the innermost modules with an attribute ``num_heads`` or ``heads``. Attached layer attention
    is counted only if there are no others.

    Raises:
        ValueError: the network has no attention layers.
    """
    numbers = {module: _num_heads(module) for module in network.modules()}
    layers = [module for module, number in numbers.items() if number]
    inner = [m for m in layers if not any(numbers[child] for child in m.modules() if child is not m)]
    found = [m for m in inner if not isinstance(m, LayerAttention)] or inner
    if not found:
        raise ValueError(f"{type(network).__name__} has no attention with a number of heads")
    return sum(numbers[module] for module in found) / len(found)


def _num_heads(module: nn.Module) -> int:
    values = (getattr(module, name, None) for name in ("num_heads", "heads"))
    return next((value for value in values if isinstance(value, int)), 0)


def plot_heads(
    curves: Mapping[str, Sequence[HeadsPoint]],
    metric: Metric,
    *,
    gains: Mapping[str, Sequence[HeadsPoint]] | None = None,
    title: str = "",
) -> Figure:
    """Plots a metric by the number of heads, with intervals over seeds as error bars (CB, Figure 9).

    Args:
        curves: the points of each network, by its name.
        metric: the metric.
        gains: the differences to the plain network, by the names of the networks, for a second panel.
        title: title of the figure; made from the name of the metric if empty.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    if not curves:
        raise ValueError("there are no networks to plot")
    panels = [curves, *([gains] if gains else [])]
    figure = Figure(figsize=(4.8 * len(panels), 3.8), layout="constrained")
    bars = any(point.half_width for panel in panels for points in panel.values() for point in points)
    note = "; bars: 95% intervals over seeds" if bars else ""
    figure.suptitle((title or f"{metric.title} by the number of heads") + note, fontsize=10)
    colors = {name: f"C{number % 10}" for number, name in enumerate(curves)}
    scale = 100 if metric.percent else 1
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, panel, colors, scale)
        axes.set_xscale("log", base=2)
        heads = sorted({point.heads for points in panel.values() for point in points})
        axes.set_xticks(heads, [f"{number:g}" for number in heads])
        axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
        axes.set_xlabel("heads of an attention layer", fontsize=9)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
    left, *right = figure.axes
    if metric.percent:  # an interval of few seeds can exceed what is possible
        low, high = left.get_ylim()
        left.set_ylim(max(low, 0), min(high, 100))
    left.set_ylabel(metric.title + (" [%]" if metric.percent else ""), fontsize=9)
    for axes in right:
        axes.axhline(0, color="k", linewidth=0.8)
        axes.set_ylabel("difference to the plain network" + (" [points]" if metric.percent else ""), fontsize=9)
    return figure


def _draw(axes: Any, curves: Mapping[str, Sequence[HeadsPoint]], colors: Mapping[str, str], scale: float) -> None:
    for number, (name, points) in enumerate(curves.items()):
        shift = 1 + 0.02 * (number - (len(curves) - 1) / 2)  # error bars of several networks do not overlap
        axes.errorbar(
            [point.heads * shift for point in points], [scale * point.mean for point in points],
            [scale * (point.half_width or 0.0) for point in points],
            color=colors[name], marker="o", markersize=4, linewidth=1.5, capsize=3, label=name,
        )  # fmt: skip
