"""What the queries and keys of an attention are: tokens of a grid, tokens before it, or tokens of windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..hosts.carried import Grid
from ..hosts.finding.patch_embedding import MAX_PREFIX

# Functions that only move the values of a tensor, with which networks divide maps into windows.
_NAMES = (
    "__getitem__", "clone", "contiguous", "flatten", "movedim", "narrow", "permute", "reshape", "roll", "squeeze",
    "swapaxes", "swapdims", "transpose", "unflatten", "unfold", "unsqueeze", "view",
)  # fmt: skip
_MOVING = {getattr(owner, name) for owner in (torch, Tensor) for name in _NAMES if hasattr(owner, name)}
_FOLLOWED = {*_MOVING, F.pad, F.layer_norm}


@dataclass(frozen=True)
class Tokens:
    """The queries or the keys of an attention.

    Args:
        prefix: number of tokens before those of the grid: class, distillation and register tokens.
        grid: height and width of the map whose pixels or patches the other tokens are; None if unknown, or if there are
            no others.
        windows: for attention in windows, the position of every token in the grid, row by row, [windows, tokens]; -1
            for tokens outside the map. None if all tokens of the grid attend to each other, or if unknown.
        stride: token (i, j) of the grid is the pixel (i stride, j stride) of a larger map.
        pixels: height and width of that map; None if it is the grid itself.
    """

    prefix: int = 0
    grid: Grid | None = None
    windows: Tensor | None = None
    stride: int = 1
    pixels: Grid | None = None

    def positions(self) -> Tensor | None:
        """Returns the centers of the tokens of the grid as fractions of its height and width, [H W, 2], or None."""
        if self.grid is None:
            return None
        sides = zip(self.grid, self.pixels or self.grid, strict=True)
        return torch.cartesian_prod(*((torch.arange(count) * self.stride + 0.5) / size for count, size in sides))


def tokens_on_grid(count: int, grids: Sequence[Grid]) -> Tokens:
    """Returns what `count` tokens are, given the sizes of the maps that the network has computed before them.

    They are the pixels of the most recent map with as many pixels or, if there is none, of that which leaves the fewest
    tokens over. The remaining tokens are before the grid. Maps of one pixel, such as those of squeeze and excitation,
    are not considered.
    """
    sizes = {grid: grid[0] * grid[1] for grid in reversed(grids)}
    fitting = [grid for grid, size in sizes.items() if size > 1 and 0 <= count - size < MAX_PREFIX]
    if fitting:
        grid = max(fitting, key=lambda grid: sizes[grid])
        return Tokens(count - sizes[grid], grid)
    return Tokens(1 if count == 1 else 0)  # a class token that attends alone


class Moved(NamedTuple):
    """Where the values of a tensor come from.

    Args:
        places: for each value, its index in another tensor; -1 if it does not come from there.
        source: the shape of that tensor.
    """

    places: Tensor
    source: torch.Size


class Movements:
    """Follows the values of maps through functions that only move them, such as shifts and divisions into windows."""

    def __init__(self) -> None:
        self._sources = WeakTensorKeyDictionary()
        self._moved = WeakTensorKeyDictionary()

    def start(self, tensor: Tensor) -> None:
        """Follows the values of a tensor from here."""
        self._sources[tensor] = True

    def follow(self, func: Callable[..., Any], result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Must be called after every function."""
        if func not in _FOLLOWED or not args or not isinstance(args[0], Tensor) or not isinstance(result, Tensor):
            return
        moved = self._moved.get(args[0])
        if moved is None and args[0] in self._sources:
            places = torch.arange(args[0].numel(), dtype=torch.int32, device=args[0].device)
            moved = Moved(places.view(args[0].shape), args[0].shape)
        if moved is None or any(isinstance(arg, torch.dtype) for arg in args):  # a view of another type
            return
        if func is F.layer_norm:  # changes the values of each token, but moves none
            self._moved[result] = moved
        elif func is not F.pad:
            self._moved[result] = Moved(func(moved.places, *args[1:], **kwargs), moved.source)
        elif (args[2] if len(args) > 2 else kwargs.get("mode", "constant")) == "constant":
            widths = args[1] if len(args) > 1 else kwargs["pad"]
            self._moved[result] = Moved(F.pad(moved.places, widths, value=-1), moved.source)

    def moved(self, tensor: Tensor) -> Moved | None:
        """Returns where the values of a tensor come from, or None if they were not moved from a map."""
        return self._moved.get(tensor)


def tokens_of_windows(moved: Moved, channels: int, shape: tuple[int, int], stated: Sequence[Grid]) -> Tokens:
    """Returns what the tokens of windows are.

    Args:
        moved: where the values of the tokens [..., C] come from: a map [B, H, W, C], [B, C, H, W] or [B, H W, C]. The
            first two channels are enough.
        channels: C.
        shape: number of windows of an image, and number of tokens of a window.
        stated: the sizes of maps [B, H W, C] that the network has passed to its modules.
    """
    source = moved.source
    places = moved.places.flatten(0, -2)[: shape[0] * shape[1]].long()  # of the first image
    inside = places[:, 0] >= 0
    step = (places[:, -1] - places[:, 0])[inside]
    grid: Grid | None = None
    if source[-1] == channels and bool((step == places.shape[1] - 1).all()):
        position = places[:, 0] // channels
        if len(source) == 4:
            grid = (source[1], source[2])
        elif len(source) == 3:
            grid = next((grid for grid in reversed(stated) if grid[0] * grid[1] == source[1]), None)
    elif len(source) == 4 and source[1] == channels and bool((step == source[2] * source[3]).all()):
        position, grid = places[:, 0], (source[2], source[3])
    if grid is None or int(position.max()) >= grid[0] * grid[1]:
        return Tokens()
    return Tokens(0, grid, torch.where(inside, position, -1).view(shape).cpu())
