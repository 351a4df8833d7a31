"""Plots of measures of spatial attention, by depth. Every function returns a matplotlib Figure and opens no window."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .attention_layers import HIGH, LOW, LayerDistance, LayerEntropy, LayerJacobian
from .broadcast_scales import BroadcastScale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL = (4.6, 3.5)  # inches
LETTERS = 13  # letters of small text in an inch
MOST_TICKS = 16
COLUMNS = 3  # number of networks side by side
BAND = f"band: {100 * LOW:.0f}th to {100 * HIGH:.0f}th percentile of the rows"
BOUND = "#c03030"
UNIFORM = "uniform attention: log of the number of keys"


def plot_attention_entropy(
    networks: Mapping[str, Sequence[LayerEntropy]], *, title: str = "Entropy of attention rows"
) -> Figure:
    """Plots the entropy of attention by depth (CB, Figures 4 and 7a).

    The first panel shows the mean over all queries, and a band from the 15th to the 85th percentile: its lower edge is
    the "15th percentile" of the caption of CB's Figure 4, its upper edge the beginning of "the top 15%" of the text. A
    second panel shows the entropy of the class token, if a network has one. Dotted lines are the entropy of uniform
    attention, log N for N keys.

    Args:
        networks: the results of `interlayer.attention_entropy` by the name of the network.
        title: title of the figure.
    """
    _check(networks)
    has_class = any(layer.class_token is not None for layers in networks.values() for layer in layers)
    figure, (panels,) = _panels(1, 2 if has_class else 1)
    for index, (name, layers) in enumerate(networks.items()):
        numbers, color = range(1, len(layers) + 1), f"C{index}"
        panels[0].plot(numbers, [layer.mean for layer in layers], "o-", color=color, markersize=4, label=name)
        low, high = [layer.low for layer in layers], [layer.high for layer in layers]
        if len(layers) == 1:  # a band needs two points
            panels[0].vlines([1], low, high, color=color, alpha=0.35, linewidth=6)
        panels[0].fill_between(numbers, low, high, color=color, alpha=0.15, linewidth=0)
        own = [(number, layer.class_token) for number, layer in enumerate(layers, 1) if layer.class_token is not None]
        if own:
            panels[1].plot(*zip(*own, strict=True), "o-", color=color, markersize=4)
        _draw_bounds(panels if own else panels[:1], [layer.bound for layer in layers], networks, index)
    panels[0].set_title(f"all queries (line: mean, {BAND})", fontsize=9)
    panels[0].set_ylabel("entropy (nats)", fontsize=9)
    if has_class:
        panels[1].set_title("class token (mean)", fontsize=9)
    highest = max(layer.bound for layers in networks.values() for layer in layers)
    for axes in panels:
        _by_depth(axes, max(len(layers) for layers in networks.values()))
        axes.set_ylim(0, 1.1 * highest)
    _legend(figure, panels[0])
    _headline(figure, title, averaged_over(networks, "queries"))
    return figure


def plot_attention_distance(
    networks: Mapping[str, Sequence[LayerDistance]],
    *,
    per_query: bool = False,
    title: str = "Relative distance of attention",
) -> Figure:
    """Plots the relative distance of spatial interactions by depth (CB, Figure 7b).

    Points are heads, the line is their mean. Dashed lines show uniform attention to the same keys.

    Args:
        networks: the results of `interlayer.analysis.attention_distance` by the name of the network.
        per_query: whether the distances were measured with `per_query=True`.
        title: title of the figure.
    """
    _check(networks)
    figure, ((axes,),) = _panels(1, 1, width=6.0)
    for index, (name, layers) in enumerate(networks.items()):
        numbers, color = range(1, len(layers) + 1), f"C{index}"
        for number, layer in enumerate(layers, 1):
            axes.plot([number] * len(layer.heads_means), layer.heads_means, ".", color=color, markersize=4, alpha=0.35)
        axes.plot(numbers, [layer.mean for layer in layers], "o-", color=color, markersize=4, label=name)
        label = "uniform attention to the same keys" if index == 0 else None
        axes.plot(numbers, [layer.uniform for layer in layers], "--", color=color, linewidth=1, label=label)
    axes.set_ylabel(
        "sum over keys of a |p - p'|, mean over queries" if per_query else "mean of a |p - p'| over pairs of tokens",
        fontsize=9,
    )
    every = [value for layers in networks.values() for layer in layers for value in (*layer.heads_means, layer.uniform)]
    axes.set_ylim(0, 1.1 * max(every))
    _by_depth(axes, max(len(layers) for layers in networks.values()))
    _legend(figure, axes)
    unit = "|p - p'|: L1 distance in fractions of the image's sides"
    images = next(iter(networks.values()))[0].images
    _headline(figure, title, f"mean over {counted(images, 'image')} and all heads (points: single heads)", unit)
    return figure


def plot_attention_jacobian(
    networks: Mapping[str, Sequence[LayerJacobian]], *, title: str = "Gradient of the softmax against entropy"
) -> Figure:
    """Plots the nuclear norm of the softmax's Jacobian against the entropy of attention rows (CB, Figure 5).

    The first panel is the softmax of two scores, as in the paper: the norm is largest where both weights are equal. The
    others show rows of the attention of each network, and the mean of each layer.

    Args:
        networks: the results of `interlayer.analysis.attention_jacobian` by the name of the network.
        title: title of the figure.
    """
    _check(networks)
    count = len(networks) + 1
    lines = math.ceil(count / COLUMNS)
    figure, grid = _panels(lines, math.ceil(count / lines), width=3.7)
    panels = [axes for row in grid for axes in row]
    difference = np.linspace(-6, 6, 241)
    weight = 1 / (1 + np.exp(-difference))
    panels[0].plot(difference, 2 * weight * (1 - weight), color="0.2")
    panels[0].axvline(0, color=BOUND, linestyle=":", linewidth=1)
    panels[0].set_title("softmax of two scores", fontsize=9)
    panels[0].set_xlabel("difference of the scores, $x_1 - x_2$", fontsize=9)
    panels[0].set_ylabel("nuclear norm of the Jacobian", fontsize=9)
    panels[0].set_ylim(0, 0.55)
    depth = max(len(layers) for layers in networks.values())
    keys = max(layer.keys for layers in networks.values() for layer in layers)
    for axes, (name, layers) in zip(panels[1:], networks.items(), strict=False):
        curve = np.linspace(0, math.log(keys), 200)
        axes.plot(curve, 1 - np.exp(-curve), ":", color=BOUND, linewidth=1.2, label="equal weights: 1 - exp(-entropy)")
        for number, layer in enumerate(layers, 1):
            points = {"c": np.full(len(layer.norms), number), "vmin": 1, "vmax": max(depth, 2), "cmap": "viridis"}
            axes.scatter(layer.entropies, layer.norms, s=3, alpha=0.15, linewidths=0, rasterized=True, **points)
        means = [(layer.entropy, layer.norm) for layer in layers]
        shown = axes.scatter(
            *zip(*means, strict=True), c=range(1, len(layers) + 1), vmin=1, vmax=max(depth, 2), cmap="viridis",
            s=34, edgecolors="k", linewidths=0.7, label="mean of a layer",
        )  # fmt: skip
        axes.set_title(textwrap.fill(name, int(PANEL[0] * LETTERS * 0.8)), fontsize=9)
        axes.set_xlabel("entropy of the row (nats)", fontsize=9)
        axes.set_ylim(0, 1.03)
        axes.set_xlim(0, 1.03 * math.log(keys))
    panels[1].legend(fontsize=7.5, loc="lower right")
    for axes in panels[:count]:
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=8)
    for axes in panels[count:]:
        axes.remove()
    bar = figure.colorbar(shown, ax=panels[1:count], shrink=0.8, pad=0.02)
    bar.set_label("attention layer", fontsize=9)
    bar.set_ticks([tick for tick in bar.get_ticks() if tick == int(tick) and 1 <= tick <= max(depth, 2)])
    _headline(figure, title, averaged_over(networks, "queries"), "small points: single rows of the attention")
    return figure


def plot_broadcast_scales(
    networks: Mapping[str, Sequence[BroadcastScale]], *, title: str = "Scales of context broadcasting"
) -> Figure:
    """Plots the ratio of quantiles and the mean of the scales of CB_S by depth (CB, Figure 8).

    Args:
        networks: the results of `interlayer.analysis.broadcast_scales` by the name of the network.
        title: title of the figure.
    """
    _check(networks)
    figure, (panels,) = _panels(1, 2)
    longest = max(networks.values(), key=len)
    for index, (name, layers) in enumerate(networks.items()):
        numbers, style = range(1, len(layers) + 1), {"color": f"C{index}", "markersize": 4}
        panels[0].plot(numbers, [layer.ratio for layer in layers], "o-", label=name, **style)
        panels[1].plot(numbers, [layer.mean for layer in layers], "o-", **style)
    panels[0].set_title(r"$|\lambda_{0.1}|\,/\,|\lambda_{0.9}|$: ratio of quantiles of $|\lambda|$", fontsize=9)
    panels[1].set_title(r"mean of $\lambda$ over channels", fontsize=9)
    panels[0].set_ylim(bottom=0)
    panels[1].axhline(0, color="0.6", linewidth=0.8)
    if all(math.isnan(layer.ratio) for layers in networks.values() for layer in layers):
        panels[0].text(
            0.5, 0.5, "no ratio: all scales are zero,\nas before training", transform=panels[0].transAxes, ha="center",
            va="center", fontsize=9, color="0.4",
        )  # fmt: skip
    names = [layer.name for layer in longest]
    step = math.ceil(len(names) / MOST_TICKS)
    same = all([layer.name for layer in layers] == names[: len(layers)] for layers in networks.values())
    for axes in panels:
        _by_depth(axes, len(names))
        if same:  # the names of components say more than their numbers
            axes.set_xticks(range(1, len(names) + 1, step), names[::step], rotation=60, ha="right", fontsize=7.5)
            axes.set_xlabel("")
    _legend(figure, panels[0])
    _headline(figure, title, "a ratio near 1: all channels add about as much of the average token")
    return figure


def averaged_over(networks: Mapping[str, Sequence[LayerEntropy | LayerJacobian]], what: str) -> str:
    """Returns a sentence that says over how many images and heads a figure was averaged."""
    layers = [layer for each in networks.values() for layer in each]
    heads = sorted({layer.heads for layer in layers})
    images = sorted({layer.images for layer in layers})
    shown = str(heads[0]) if len(heads) == 1 else f"{heads[0]} to {heads[-1]}"
    number = counted(images[0], "image") if len(images) == 1 else f"{images[0]} to {images[-1]} images"
    return f"mean over {number}, {shown} {'head' if heads == [1] else 'heads'} per layer and all {what}"


def counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _check(networks: Mapping[str, Sequence[Any]]) -> None:
    if not networks or not all(networks.values()):
        raise ValueError("there are no networks to plot")


def _panels(lines: int, columns: int, width: float = PANEL[0]) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns + 0.4, PANEL[1] * lines + 0.7), layout="constrained")
    return figure, figure.subplots(lines, columns, squeeze=False)


def _by_depth(axes: Any, layers: int) -> None:
    """Sets the horizontal axis of a panel whose curves go over the layers of a network."""
    axes.set_xlabel("attention layer, from the first to the last", fontsize=9)
    axes.set_xticks(range(1, layers + 1, math.ceil(layers / MOST_TICKS)))
    axes.set_xlim(0.5, layers + 0.5)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)


def _draw_bounds(panels: Sequence[Any], bounds: Sequence[float], networks: Mapping[str, Any], index: int) -> None:
    """Draws the entropy of uniform attention: one line if it is the same everywhere, otherwise one for each network."""
    every = {layer.bound for layers in networks.values() for layer in layers}
    for axes in panels:
        if len(every) > 1:
            numbers = range(1, len(bounds) + 1)
            axes.plot(numbers, bounds, ":", color=f"C{index}", linewidth=1.3, label="" if index else UNIFORM)
        elif index == 0:
            axes.axhline(bounds[0], color=BOUND, linestyle=":", linewidth=1.3)
            axes.annotate(
                f"uniform attention: log {round(math.exp(bounds[0]))} = {bounds[0]:.2f}", (0.99, bounds[0]), (0, 2),
                xycoords=("axes fraction", "data"), textcoords="offset points", ha="right", va="bottom", fontsize=7.5,
                color=BOUND,
            )  # fmt: skip


def _legend(figure: Figure, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    named = sorted(zip(handles, labels, strict=True), key=lambda entry: entry[1].startswith("uniform attention"))
    letters = int(figure.get_figwidth() * LETTERS) - 8
    labels = [textwrap.fill(label, letters) for _, label in named]
    columns = len(named) if sum(map(len, labels)) + 6 * len(labels) < letters else 1
    figure.legend([handle for handle, _ in named], labels, loc="outside lower center", ncols=columns, fontsize=8.5)


def _headline(figure: Figure, title: str, *notes: str) -> None:
    """Writes the title, and what was averaged below it."""
    letters = int(figure.get_figwidth() * LETTERS * 1.05)
    lines = [line for note in notes for line in textwrap.wrap(note, letters)]
    figure.suptitle("\n".join([textwrap.fill(title, letters), *lines]), fontsize=9.5)
