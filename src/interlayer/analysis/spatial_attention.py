"""Spatial attention of a network: how much every query attends to every key, for any model.

    weights = softmax(q kᵀ s + mask)        [B, heads, queries, keys], each row sums to one

The weights are those that the softmax returns. Where a network changes them before they are multiplied with the values
(talking heads in CaiT, the instance norm of EMSA), the change is not included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import ops
from ..hosts import evaluating
from .attention_tokens import Tokens
from .attention_watch import AttentionWatch
from .capture import hooked

# Halo attention calls torch's attention in this implementation; other operations have none of this name and run their
# reference, which stores its weights.
BACKEND = "gathered"


@dataclass(frozen=True)
class AttentionMap:
    """The weights of one spatial attention.

    Args:
        name: name of the module that computes it.
        weights: [B, heads, queries, keys], or [B, windows, heads, queries, keys] for attention in windows.
        queries: what the queries are.
        keys: what the keys are.
        frame: height and width of the image as fractions of the region that the grids cover. They are less than one if
            the network pads images at the right and at the bottom, as detectors and segmenters do.
    """

    name: str
    weights: Tensor
    queries: Tokens
    keys: Tokens
    frame: tuple[float, float] = (1.0, 1.0)

    @property
    def heads(self) -> int:
        return self.weights.shape[-3]

    @property
    def in_windows(self) -> bool:
        return self.weights.dim() == 5

    def from_query(self, query: tuple[int, int] | Literal["class"]) -> Tensor:
        """Returns the weights of one query as a map over the grid of the keys, [B, heads, H, W].

        Weights of keys before the grid, such as the class token, are left out, and keys outside the query's window have
        a weight of zero.

        Args:
            query: row and column in the grid of the queries, or "class" for the first token before the grid.
        """
        if self.keys.grid is None:
            raise ValueError(f"{self.name} has keys of which it is not known where they are in the image")
        place = self._place(query)
        height, width = self.keys.grid
        if not self.in_windows:
            weights = self.weights[:, :, place, self.keys.prefix :]
            return weights.unflatten(-1, (height, width))
        assert self.queries.windows is not None
        assert self.keys.windows is not None
        window, token = (self.queries.windows == place).nonzero()[0].tolist()
        positions = self.keys.windows[window]
        inside = positions >= 0
        result = self.weights.new_zeros(len(self.weights), self.heads, height * width)
        result[..., positions[inside]] = self.weights[:, window, :, token][..., inside]
        return result.unflatten(-1, (height, width))

    def _place(self, query: tuple[int, int] | Literal["class"]) -> int:
        """Returns the index of a query among the queries, or in the grid for attention in windows."""
        if query == "class":
            if not self.queries.prefix:
                raise ValueError(f"{self.name} has no class token: give row and column of a query")
            return 0
        if self.queries.grid is None:
            raise ValueError(f"{self.name} has no queries in the image, only the class token")
        (row, column), (height, width) = query, self.queries.grid
        if not (0 <= row < height and 0 <= column < width):
            raise ValueError(f"{self.name} has queries in {height} rows and {width} columns, got {row}, {column}")
        if self.in_windows and (self.queries.windows is None or self.keys.windows is None):
            raise ValueError(f"{self.name} has windows of which it is not known where they are in the image")
        return row * width + column + (0 if self.in_windows else self.queries.prefix)


@contextmanager
def capture_attention(model: nn.Module, reduce: Callable[[AttentionMap], Any] | None = None) -> Iterator[list[Any]]:
    """Collects the weights of every spatial attention during forward passes inside the `with` block.

    Yields a list with an `AttentionMap` for every attention, in the order of the calls. Weights are computed in float32
    and detached. They are exact for every implementation of attention in PyTorch: a fused attention, which does not
    return its weights, is computed once more from its arguments. Inside the block, operations of this library run in
    an implementation that has weights, the fast path of `torch.nn.MultiheadAttention` is off, and a compiled network
    runs eagerly.

    Args:
        model: any network.
        reduce: a function of an `AttentionMap` whose result is kept instead of it. The weights of one attention only
            are then in memory at a time.

    >>> with torch.no_grad(), capture_attention(model) as maps:
    ...     model(images)
    >>> [(each.name, each.weights.shape) for each in maps]
    """
    with _watching(model, reduce) as (found, _):
        yield found


@contextmanager
def _watching(
    model: nn.Module, reduce: Callable[[AttentionMap], Any] | None
) -> Iterator[tuple[list[Any], AttentionWatch]]:
    found: list[Any] = []

    def keep(*facts: Any) -> None:
        each = AttentionMap(*facts)
        # The network may change the weights of a softmax in place after it.
        found.append(replace(each, weights=each.weights.clone()) if reduce is None else reduce(each))

    watch = AttentionWatch(model, keep)
    before, after = dict.fromkeys(model.modules(), watch.enter), dict.fromkeys(model.modules(), watch.leave)
    with hooked(model, before=before, after=after), ops.backend(BACKEND), _without_fast_path(), watch:
        yield found, watch


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Switches the fast path of `torch.nn.MultiheadAttention` off, which computes a whole layer by one function."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@torch.no_grad()
def attention_maps(
    model: nn.Module,
    images: Any,
    *,
    reduce: Callable[[AttentionMap], Any] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> list[Any]:
    """Runs `model` on `images` in eval mode and returns the weights of every spatial attention, in call order.

    Args:
        model: any network with attention over pixels or tokens: the models of timm, torchvision and transformers, those
            of this library, with and without mechanisms, and detectors and segmenters on them.
        images: preprocessed images [B, C, H, W], or whatever the model takes.
        reduce: a function of an `AttentionMap` whose result is returned instead of it, to save memory.
        forward: runs the model on the images, for example `Task.forward`; ``model(images)`` by default.

    Raises:
        ValueError: the network has no spatial attention.

    >>> for attention in interlayer.attention_maps(model, images):
    ...     print(attention.name, tuple(attention.weights.shape), attention.keys.grid)
    """
    with evaluating(model), _watching(model, reduce) as (found, watch):
        model(images) if forward is None else forward(model, images)
    if not found:
        channels = " (its attention is between channels)" if watch.channel_attentions else ""
        raise ValueError(
            f"{type(model).__name__} has no spatial attention{channels}: expected a network that computes a softmax of "
            f"the products of queries and keys, such as a vision transformer"
        )
    return found
