"""The layout of a block's output, and its conversion to a [B, C, H, W] map and back."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...mechanisms.protocol import TokenGrid
from ..carried import Grid
from .patch_embedding import PatchEmbedding


@dataclass
class Layout:
    """The layout of a stage's feature maps.

    Args:
        kind: "NCHW", "NHWC", or "tokens" for [B, prefix + H W, C].
        prefix: number of tokens before the grid (class, distillation, register tokens).
        patch_embed: the module that defines the grid of the tokens, or None if the arguments of the block contain it.
        embedding: the patch embedding from whose convolution the grid is known, if it is not one that states the grid.
    """

    kind: Literal["NCHW", "NHWC", "tokens"]
    prefix: int = 0
    patch_embed: nn.Module | None = None
    embedding: PatchEmbedding | None = None

    def grid_of(
        self, output: Tensor, carried: Grid | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Grid | None:
        """Returns height and width of the token grid, or None if the output does not consist of tokens.

        Args:
            output: the output of the block.
            carried: the grid that was passed with the input of the block, if any.
            args: positional arguments of the block after its input.
            kwargs: keyword arguments of the block.
        """
        if self.kind != "tokens":
            return None
        tokens = output.shape[1] - self.prefix
        grid: Any = carried
        if grid is None and self.embedding is not None:
            grid = self.embedding.grid  # the block was not run after the embedding, which passes the grid on
        elif grid is None and self.patch_embed is None:
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
        """Returns a view of the output as a map [B, C, H, W], and the prefix tokens, or None if there are none."""
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

    def to_tokens(self, output: Tensor, grid: Grid | None) -> tuple[Tensor, TokenGrid] | None:
        """Returns the output as tokens [B, prefix + H W, C] and their grid, or None if it is a map [B, C, H, W]."""
        if self.kind == "NCHW":
            return None
        if self.kind == "NHWC":
            return output.flatten(1, 2), TokenGrid(output.shape[1], output.shape[2], 0)
        assert grid is not None
        return output, TokenGrid(*grid, self.prefix)

    def from_tokens(self, tokens: Tensor, grid: TokenGrid) -> Tensor:
        """The inverse of `to_tokens`."""
        return tokens.unflatten(1, grid[:2]) if self.kind == "NHWC" else tokens


def grids_in(arguments: tuple[Any, ...], tokens: int) -> Iterator[Any]:
    """Yields the pairs (H, W) with H W = tokens in a block's arguments: `block(x, (H, W))` or `block(x, H, W)`."""
    pairs = [tuple(a) for a in arguments if isinstance(a, (tuple, list, torch.Size)) and len(a) == 2]
    pairs += [(a, b) for a, b in pairwise(arguments) if isinstance(a, int) and isinstance(b, int)]
    for height, width in pairs:
        if (
            isinstance(height, int | torch.SymInt)
            and isinstance(width, int | torch.SymInt)
            and height * width == tokens
        ):
            yield height, width
