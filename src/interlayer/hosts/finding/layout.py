"""Where height, width and channels are in what a block returns, and how it becomes a [B, C, H, W] map and back."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..carried import Grid


@dataclass
class Layout:
    """The layout of a stage's feature maps.

    Args:
        kind: "NCHW", "NHWC", or "tokens" for [B, prefix + H W, C].
        prefix: tokens before the grid (class, distillation, registers).
        patch_embed: the module that knows the grid of the tokens; None where the block's own arguments tell it.
    """

    kind: Literal["NCHW", "NHWC", "tokens"]
    prefix: int = 0
    patch_embed: nn.Module | None = None

    def grid_of(
        self, output: Tensor, carried: Grid | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Grid | None:
        """Height and width of the token grid; None where the map is not made of tokens.

        Args:
            output: what the block returned.
            carried: the grid that travelled with the block's input, where one did.
            args: positional arguments of the block behind its input.
            kwargs: its keyword arguments.
        """
        if self.kind != "tokens":
            return None
        tokens = output.shape[1] - self.prefix
        grid: Any = carried
        if grid is None and self.patch_embed is None:
            grid = next(grids_in((*args, *kwargs.values()), tokens), None)
        elif grid is None:
            grid = self.patch_embed.grid_size  # type: ignore[union-attr]
        if grid is None or grid[0] * grid[1] != tokens:
            raise ValueError(
                f"{tokens} patch tokens do not fill the grid {grid} of the patch embedding: layer attention needs "
                f"every patch, so turn off what drops tokens (patch_drop_rate)"
            )
        return grid[0], grid[1]

    def to_map(self, output: Tensor, grid: Grid | None) -> tuple[Tensor, Tensor | None]:
        """A view of the feature map as [B, C, H, W], and the prefix tokens where there are any."""
        if self.kind == "NCHW":
            return output, None
        if self.kind == "NHWC":
            return output.permute(0, 3, 1, 2), None
        assert grid is not None
        prefix, patches = output[:, : self.prefix], output[:, self.prefix :]
        return patches.unflatten(1, grid).permute(0, 3, 1, 2), (prefix if self.prefix else None)

    def from_map(self, feature_map: Tensor, prefix: Tensor | None) -> Tensor:
        """The inverse of `to_map`."""
        if self.kind == "NCHW":
            return feature_map
        channels_last = feature_map.permute(0, 2, 3, 1)
        if self.kind == "NHWC":
            return channels_last
        patches = channels_last.flatten(1, 2)
        return patches if prefix is None else torch.cat((prefix.to(patches.dtype), patches), dim=1)


def grids_in(arguments: tuple[Any, ...], tokens: int) -> Iterator[Any]:
    """Pairs (H, W) with H W = tokens among a block's arguments: `block(x, (H, W))` or `block(x, H, W)`."""
    pairs = [tuple(a) for a in arguments if isinstance(a, (tuple, list, torch.Size)) and len(a) == 2]
    pairs += [(a, b) for a, b in pairwise(arguments) if isinstance(a, int) and isinstance(b, int)]
    for height, width in pairs:
        if (
            isinstance(height, int | torch.SymInt)
            and isinstance(width, int | torch.SymInt)
            and height * width == tokens
        ):
            yield height, width
