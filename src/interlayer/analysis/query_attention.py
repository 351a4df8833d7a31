"""What one query of an image attends to (MRLA, Figure 7; CB, Figure 10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from ..hosts.carried import Grid
from .spatial_attention import AttentionMap, attention_maps

Query = tuple[int, int] | Literal["class"]
CENTER = (0.5, 0.5)


@dataclass(frozen=True)
class QueryAttention:
    """The attention of one query of each image, in one layer.

    Args:
        layer: name of the module.
        number: number of the attention in the network, from 1.
        layers: number of attentions of the network.
        maps: the weights over the grid of the keys, [B, heads, H, W].
        query: row and column of the query, or "class".
        grid: height and width of the grid of the queries; None for the class token.
        frame: height and width of the image as fractions of the region that the grids cover.
    """

    layer: str
    number: int
    layers: int
    maps: Tensor
    query: Query
    grid: Grid | None
    frame: tuple[float, float] = (1.0, 1.0)

    @property
    def box(self) -> tuple[float, float, float, float] | None:
        """Top, left, height and width of the query's patch as fractions of the image; None for the class token."""
        if self.grid is None or self.query == "class":
            return None
        sides = [1 / (size * part) for size, part in zip(self.grid, self.frame, strict=True)]
        return self.query[0] * sides[0], self.query[1] * sides[1], sides[0], sides[1]


def query_attention(
    model: nn.Module,
    images: Any,
    *,
    layer: int | str = -1,
    query: Query | None = None,
    at: tuple[float, float] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> QueryAttention:
    """Returns what a query attends to: the weights of one row of a spatial attention as a map, for every head.

    Args:
        model: any network with spatial attention.
        images: preprocessed images [B, C, H, W], or whatever the model takes.
        layer: number of the attention from 0, negative from the end, or the name of its module or of a module that
            contains it, such as "blocks.3"; also the end of such a name, as in "body.network.blocks.3".
        query: row and column in the grid of the queries, or "class" for the class token.
        at: horizontal and vertical position of the query as fractions of the image, instead of `query`. Default: the
            center, or the class token if the layer has no other query.
        forward: runs the model on the images; ``model(images)`` by default.

    Raises:
        ValueError: the network has no spatial attention, no such layer or no such query.
    """
    if query is not None and at is not None:
        raise ValueError("the query is given twice: by row and column, and as a position in the image")
    names = attention_maps(model, images, reduce=lambda each: each.name, forward=forward)
    number = attention_number(names, layer)
    seen = 0

    def reduce(each: AttentionMap) -> QueryAttention | None:
        nonlocal seen
        seen += 1
        if seen != number + 1:
            return None
        chosen = query if query is not None else _query_at(each, at)
        grid = None if chosen == "class" else each.queries.grid
        maps = each.from_query(chosen)
        return QueryAttention(each.name, number + 1, len(names), maps, chosen, grid, each.frame)

    found: QueryAttention = attention_maps(model, images, reduce=reduce, forward=forward)[number]
    return found


def attention_number(names: Sequence[str], layer: int | str) -> int:
    """Returns the number of an attention from 0, given its number or the name of a module that contains it.

    Args:
        names: the names of the modules of all attentions.
        layer: a number, negative from the end, or a name.
    """
    if isinstance(layer, int):
        if not -len(names) <= layer < len(names):
            raise ValueError(
                f"there is no such layer: the network has {len(names)} attentions, {names[0]} to {names[-1]}"
            )
        return layer % len(names)
    inside = [number for number, name in enumerate(names) if f".{layer}." in f".{name}."]
    if not inside:
        some = ", ".join(names if len(names) <= 6 else [*names[:3], "...", *names[-2:]])
        raise ValueError(f"the network has no attention in {layer!r}: expected one of {some}")
    return inside[-1]


def _query_at(each: AttentionMap, at: tuple[float, float] | None) -> Query:
    """Returns the query whose patch contains a point of the image, or the class token if there is no other query."""
    grid = each.queries.grid
    if grid is None and each.queries.prefix and at is None:
        return "class"
    across, down = CENTER if at is None else at
    if not (0 <= across <= 1 and 0 <= down <= 1):
        raise ValueError(f"a position in the image is from 0% to 100%, got {100 * across:g}%,{100 * down:g}%")
    height, width = grid or (1, 1)  # a layer without queries in the image is refused by `AttentionMap.from_query`
    row, column = (
        int(part * of * size) for part, of, size in zip((down, across), each.frame, (height, width), strict=True)
    )
    return min(row, height - 1), min(column, width - 1)
