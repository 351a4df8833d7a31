"""Pictures of attention: what a query attends to, over the photograph, and how similar the heads of EMSA are."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from .emsa_heads import HeadSimilarity
from .overlay import COLORS, MARK, OPACITY, color_scale
from .query_attention import QueryAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL = 1.75  # inches of a photograph
HEADS = 8  # number of heads that are shown if none are chosen
LETTERS = 13  # letters of small text in an inch
MAPS = {
    "scores": "before the mixing:\n$QK^T/\\sqrt{d}$",
    "mixed": "after the mixing:\n$Conv(QK^T/\\sqrt{d})$",
    "normalized": "after softmax and norm:\n$IN(Softmax(Conv(QK^T/\\sqrt{d})))$",
}


@dataclass(frozen=True)
class AttentionRow:
    """The attention of one query of one image in one network.

    Args:
        title: name of the network, or of the image.
        picture: the image as bytes, as the network sees it, [3, H, W].
        attention: the result of `interlayer.analysis.query_attention` for that image alone.
    """

    title: str
    picture: Tensor
    attention: QueryAttention


def plot_query_attention(
    rows: Sequence[AttentionRow],
    *,
    heads: Sequence[int] | Literal["mean"] | None = None,
    scale: Literal["shared", "own"] = "shared",
    title: str = "What a query attends to",
) -> Figure:
    """Plots the attention of a query over the photograph, heads side by side (MRLA, Figure 7; CB, Figure 10).

    Every row is a network or an image. The query is marked by a red box.

    Args:
        rows: the attention of each network.
        heads: the heads to show, from 0, or "mean" for the mean over all heads. Default: all heads, or eight evenly
            spaced ones if there are more.
        scale: "shared" for one color scale from the smallest to the largest weight of all maps, so that maps of
            different heads and networks can be compared; "own" to scale each map from its smallest to its largest
            weight.
        title: title of the figure.

    Raises:
        ValueError: there is no such head.
    """
    from matplotlib.figure import Figure

    if not rows:
        raise ValueError("there are no networks to plot")
    if scale not in ("shared", "own"):
        raise ValueError(f"scale must be 'shared' or 'own', got {scale!r}")
    shown = [_maps(row, heads) for row in rows]
    low = min(float(weights.min()) for maps in shown for _, weights in maps)
    high = max(float(weights.max()) for maps in shown for _, weights in maps)
    columns = 1 + max(len(maps) for maps in shown)
    height, width = rows[0].picture.shape[-2:]
    size = (PANEL * columns + 1.0, (PANEL * height / width + 0.35) * len(rows) + 0.7)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for line, row, maps in zip(grid, rows, shown, strict=True):
        _draw_photograph(line[0], row.picture, row.attention)
        line[0].set_ylabel(_label(row.title, max(int(PANEL * height / width * LETTERS), 16)), fontsize=8)
        for axes, (name, weights) in zip(line[1:], maps, strict=False):
            _draw_photograph(axes, row.picture, row.attention)
            limits = (low, high) if scale == "shared" else (float(weights.min()), float(weights.max()))
            image = _draw_map(axes, weights, row, limits)
            axes.set_title(name, fontsize=8)
        for axes in line[1 + len(maps) :]:
            axes.remove()
    grid[0, 0].set_title("image", fontsize=8)
    drawn = [axes for line, maps in zip(grid, shown, strict=True) for axes in line[: 1 + len(maps)]]
    bar = color_scale(figure, image, "attention weight", ax=drawn, shrink=min(1.0, 1.8 / len(rows)), aspect=16)
    bar.ax.tick_params(labelsize=7.5)
    if scale == "own":
        bar.set_ticks(list(image.get_clim()), labels=["lowest", "highest"])
        bar.set_label("attention weight in each map", fontsize=8)
    letters = int(size[0] * LETTERS)
    lines = [line for note in _notes(rows, shown) for line in textwrap.wrap(note, letters)]
    figure.suptitle("\n".join([textwrap.fill(title, letters), *lines]), fontsize=9)
    return figure


def plot_emsa_heads(
    networks: Mapping[str, HeadSimilarity], *, title: str = "Similarity of the heads of EMSA"
) -> Figure:
    """Plots the cosine similarity between the heads of one EMSA in each network (ResT, Figure 1).

    Columns are the maps before the mixing of heads, after it, and after softmax and instance norm. Above each matrix is
    the mean similarity of two different heads: the lower, the more diverse they are.

    Args:
        networks: one result of `interlayer.analysis.emsa_heads` by the name of the network.
        title: title of the figure.
    """
    from matplotlib.figure import Figure

    if not networks:
        raise ValueError("there are no networks to plot")
    figure = Figure(figsize=(9.4, 2.9 * len(networks) + 0.8), layout="constrained")
    grid = figure.subplots(len(networks), len(MAPS), squeeze=False)
    for line, (name, heads) in zip(grid, networks.items(), strict=True):
        for axes, (key, text) in zip(line, MAPS.items(), strict=True):
            similarity = getattr(heads, key)
            image = axes.imshow(similarity.numpy(), vmin=-1, vmax=1, cmap="RdBu_r")
            axes.set_title(f"{text}\nmean of two heads {heads.mean(similarity):.2f}", fontsize=8.5)
            axes.set_xticks(range(len(similarity)))
            axes.set_yticks(range(len(similarity)))
            axes.tick_params(labelsize=7.5)
            axes.set_xlabel("head", fontsize=8.5)
        line[0].set_ylabel(f"{textwrap.fill(name, 34)}\n{heads.name}\n\nhead", fontsize=8.5)
    bar = figure.colorbar(image, ax=grid, shrink=0.8, pad=0.02)
    bar.set_label("cosine similarity", fontsize=8.5)
    images = {heads.images for heads in networks.values()}
    number = " and ".join(str(count) for count in sorted(images))
    figure.suptitle(f"{title}\nmean over {number} {'image' if images == {1} else 'images'}", fontsize=9.5)
    return figure


def _maps(row: AttentionRow, heads: Sequence[int] | Literal["mean"] | None) -> list[tuple[str, Tensor]]:
    """Returns the maps to show with their titles, [H, W] each."""
    maps = row.attention.maps
    if len(maps) != 1:
        raise ValueError(f"expected the attention of one image in each row, got {len(maps)} images in {row.title!r}")
    count = maps.shape[1]
    if heads == "mean":
        return [(f"mean of {count} heads", maps[0].mean(0).cpu())]
    if heads is None:
        shown = min(count, HEADS)
        heads = [round(place * (count - 1) / max(shown - 1, 1)) for place in range(shown)]
    for head in heads:
        if not 0 <= head < count:
            raise ValueError(f"{row.title}: {row.attention.layer} has heads from 0 to {count - 1}, got {head}")
    return [(f"head {head}", maps[0, head].cpu()) for head in heads]


def _label(text: str, letters: int) -> str:
    """Returns the name of a network in lines of at most so many letters, broken before its mechanisms."""
    wrapped = textwrap.wrap(text.replace("+", " +") if len(text) > letters else text, letters, break_long_words=False)
    return "\n".join(wrapped)


def _draw_photograph(axes: Any, picture: Tensor, attention: QueryAttention) -> None:
    """Draws the photograph with the box of the query."""
    from matplotlib.patches import Rectangle

    height, width = picture.shape[-2:]
    axes.imshow(picture.permute(1, 2, 0).cpu().numpy(), extent=(0, width, height, 0), interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    if attention.box is not None:
        top, left, high, wide = attention.box
        place, size = (left * width, top * height), (wide * width, high * height)
        axes.add_patch(Rectangle(place, *size, fill=False, edgecolor=MARK, linewidth=1.3, zorder=3))


def _draw_map(axes: Any, weights: Tensor, row: AttentionRow, limits: tuple[float, float]) -> Any:
    """Draws a map over the photograph, of which it may cover more than what is seen, and returns it."""
    height, width = row.picture.shape[-2:]
    down, across = row.attention.frame
    image = axes.imshow(
        weights.numpy(), extent=(0, width / across, height / down, 0), cmap=COLORS, vmin=limits[0],
        vmax=max(limits[1], limits[0] + 1e-12), alpha=OPACITY, interpolation="nearest", zorder=2,
    )  # fmt: skip
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    return image


def _notes(rows: Sequence[AttentionRow], shown: Sequence[Sequence[Any]]) -> list[str]:
    """Returns what the figure shows: the layer, the query and the number of heads of each network."""
    notes = []
    for row, maps in zip(rows, shown, strict=True):
        found = row.attention
        count = found.maps.shape[1]
        query = "class token"
        if found.query != "class" and found.grid is not None:
            (line, column), (height, width) = found.query, found.grid
            query = f"query in row {line}, column {column} of {height} x {width}"
        part = f", {len(maps)} of {count} heads" if 1 < len(maps) < count else ""
        notes.append(f"{found.layer} (attention {found.number} of {found.layers}), {query}{part}")
    if len(set(notes)) == 1:
        return notes[:1]
    return [f"{row.title}: {note}" for row, note in zip(rows, notes, strict=True)]
