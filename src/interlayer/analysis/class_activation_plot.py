"""The plot of class activation maps: photographs with heatmaps over them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .class_activation import ClassActivation
from .overlay import COLORS, OPACITY, color_scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL = 1.75  # inches of a panel
LETTERS = 26  # letters of a caption or of a column's title, side by side


@dataclass(frozen=True)
class ActivationColumn:
    """Class activation maps of several images by one method, of one layer of one network.

    Args:
        title: what distinguishes the column, such as the method.
        pictures: the images as bytes, [B, 3, H, W], as the network saw them but not normalized.
        activation: the result of `interlayer.class_activation`.
        classes: the names of the classes, by label; their numbers are written if None.
    """

    title: str
    pictures: Tensor
    activation: ClassActivation
    classes: Sequence[str] | None = None


def plot_class_activation(
    columns: Sequence[ActivationColumn], *, names: Sequence[str] | None = None, title: str = "Where a class is seen"
) -> Figure:
    """Plots class activation maps over photographs (MRLA, Figure 6; ResT, Figure 2).

    Rows are images. The first column is the photograph, and each of the others has its heatmap over it, with the class
    and its probability below. All heatmaps have the same colors, and each is scaled from 0 to 1.

    Args:
        columns: the maps.
        names: the name of each image.
        title: title of the figure.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    if not columns:
        raise ValueError("there are no class activation maps to plot")
    count = len(columns[0].pictures)
    for column in columns:
        if len(column.pictures) != count or len(column.activation.maps) != count:
            raise ValueError(f"expected pictures and maps of {count} images in each column, see {column.title!r}")
    if names is not None and len(names) != count:
        raise ValueError(f"expected a name for each of {count} images, got {len(names)}")
    height, width = columns[0].pictures.shape[-2:]
    lines = max(_wrapped(column.title).count("\n") + 1 for column in columns)
    size = (PANEL * (len(columns) + 1) + 0.9, (PANEL * height / width + 0.2) * count + 0.15 * lines + 0.35)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.02, w_pad=0.03, hspace=0.0, wspace=0.0))
    figure.suptitle(textwrap.fill(title, int(11 * size[0])), fontsize=10)
    grid = figure.subplots(count, len(columns) + 1, squeeze=False)
    for row in range(count):
        _draw_picture(grid[row, 0], columns[0].pictures[row])
        if names is not None:
            grid[row, 0].set_xlabel(_short(names[row]), fontsize=7.5, labelpad=2)
        for axes, column in zip(grid[row, 1:], columns, strict=True):
            image = _draw_map(axes, column, row)
    grid[0, 0].set_title("image", fontsize=8)
    for axes, column in zip(grid[0, 1:], columns, strict=True):
        axes.set_title(_wrapped(column.title), fontsize=8)
    bar = color_scale(figure, image, "activation for the class", ax=grid, shrink=min(1.0, 1.6 / count), aspect=14)
    bar.set_ticks([0, 0.5, 1], labels=["none", "", "highest"], fontsize=7.5)
    return figure


def _draw_picture(axes: Any, picture: Tensor) -> None:
    axes.imshow(picture.permute(1, 2, 0).cpu().numpy(), interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])


def _draw_map(axes: Any, column: ActivationColumn, row: int) -> Any:
    """Draws one heatmap over its photograph and returns it, for the color scale."""
    _draw_picture(axes, column.pictures[row])
    found = column.activation
    heat = found.maps[row].cpu().numpy()
    image = axes.imshow(heat, cmap=COLORS, vmin=0, vmax=1, alpha=OPACITY, interpolation="nearest")
    if not heat.any():
        axes.text(
            0.5, 0.5, "zero everywhere", transform=axes.transAxes, ha="center", va="center", fontsize=8, color="w"
        )
    label = found.targets[row]
    name = f"class {label}" if column.classes is None else column.classes[label]
    probability = percent(found.probabilities[row])
    axes.set_xlabel(f"{_short(name, LETTERS - len(probability) - 1)} {probability}", fontsize=7.5, labelpad=2)
    return image


def percent(probability: float) -> str:
    """Returns a probability in percent, so that a small one is not written as zero."""
    return "<0.1%" if probability < 0.001 else f"{probability:.1%}" if probability < 0.1 else f"{probability:.0%}"


def _short(text: str, letters: int = LETTERS) -> str:
    return text if len(text) <= letters else text[: letters - 1].rstrip() + "…"


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.fill(line, LETTERS, break_on_hyphens=False) for line in text.splitlines())
