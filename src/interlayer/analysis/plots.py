"""Plots of the results of the analysis. Every function returns a matplotlib Figure and opens no window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .scores import StageScores
from .shared_weights import SharedWeights

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_layer_scores(
    stages: Sequence[StageScores], *, head: int | None = None, title: str = "Which layer reads which"
) -> Figure:
    """Plots a heatmap of the scores between layers for each stage, averaged over images (MRLA, Figure 1a).

    Args:
        stages: the result of `interlayer.layer_scores`.
        head: index of the head to plot; the mean over heads if None.
        title: title of the figure.
    """
    from matplotlib.figure import Figure

    if not stages:
        raise ValueError("there are no stages to plot")
    fewest = min(stage.scores.shape[1] for stage in stages)
    if head is not None and not 0 <= head < fewest:
        raise ValueError(f"head must be from 0 to {fewest - 1}, got {head}")
    figure = Figure(figsize=(3.2 * len(stages) + 0.6, 3.9), layout="constrained")
    figure.suptitle(title)
    for axes, stage in zip(figure.subplots(1, len(stages), squeeze=False)[0], stages, strict=True):
        scores = stage.scores.mean(0)
        scores = scores.mean(0) if head is None else scores[head]
        size = len(scores)
        largest = max(float(scores.abs().max()), 1e-12)
        lowest = 0.0 if float(scores.min()) >= 0 else -largest  # lambda may be negative; white is zero then
        shown = scores.masked_fill(scores.new_ones(size, size).triu(1).bool(), float("nan"))
        image = axes.imshow(
            shown.cpu().numpy(), vmin=lowest, vmax=largest, cmap="viridis" if lowest == 0 else "RdBu_r", origin="upper"
        )
        layers = range(size) if size <= 12 else range(0, size, max(1, size // 8))
        axes.set_xticks(list(layers), [str(layer + 1) for layer in layers])
        axes.set_yticks(list(layers), [str(layer + 1) for layer in layers])
        axes.set_xlabel("layer read")
        axes.set_ylabel("reading layer")
        axes.set_title(stage.name, fontsize=9)
        if size <= 6:
            _annotate(axes, scores, lowest, largest)
        figure.colorbar(image, ax=axes, shrink=0.75)
    return figure


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


def _annotate(axes, scores, lowest: float, largest: float) -> None:  # type: ignore[no-untyped-def]
    for t in range(len(scores)):
        for s in range(t + 1):
            value = float(scores[t, s])
            dark = value < 0.6 * largest if lowest == 0 else abs(value) > 0.6 * largest
            axes.text(s, t, f"{value:.2f}", ha="center", va="center", fontsize=7, color="white" if dark else "black")
