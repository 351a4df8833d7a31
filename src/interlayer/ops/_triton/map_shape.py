"""How maps are divided among the programs of kernels, and the tensors for sums that the programs store.

The maps are channels_last. A program takes some channels of some rows of one or several samples, so that sums over the
pixels of a sample need no atomic additions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .batch_norm import accumulator
from .runtime import INTERPRETED, TYPES, pieces, power_of_2

# Numbers that differ with the size of images. Kernels are not compiled anew where these are multiples of 16, or
# training on images of many sizes would wait for the compiler. Only channels decide how loads are aligned.
SIZES = [
    "height", "width", "rows", "pixels", "total_pixels", "pixels_per_segment", "segments", "pooled_segments", "samples"
]  # fmt: skip

# Sizes of tiles and numbers of tiles loaded ahead, measured on an H200 with the maps of ResNet-50.
ELEMENTS = 512  # of a tile: pixels of a row times channels
WIDEST = 8  # pixels of a row that a program holds at once
PADDING = 16  # at most one column or channel of a tile in as many lies outside the map
PER_WARP = 128  # elements of a tile
STAGES = 4  # rows that are loaded ahead
PIXEL_CHANNELS = 128  # of a tile of a program that has no rows
PIXEL_ELEMENTS = 2048  # of such a tile: pixels times channels
END_CHANNELS = 512
END_ELEMENTS = 4096
FEW_CHANNELS = 64  # of these tiles in small batches, which need many programs, with half as many elements
END_STAGES = 3
FINISH_STAGES = 3
FINISH_PIXELS = 256  # of a program
PIXELS_PER_PROGRAM = 784  # of small maps, as many as are wanted
PROGRAMS = 2 if INTERPRETED else 528  # as many as are wanted: four for each multiprocessor of an H200
SMALL_BATCH = 16
MOST_SEGMENTS = 8  # of the rows of a sample, in small batches
SEGMENT_ROWS = 8  # tall maps, such as those of a detector, have as many segments as have this number of rows


class Tiles(NamedTuple):
    """How a map is divided among programs.

    Args:
        columns: Pixels of a row that a program holds at once.
        channels: Channels of a program.
        chunks: Number of such groups of channels.
        samples: Samples of a program, one after another. Small maps need several, because a program that starts and
            ends often takes longer than its loop.
        groups: Number of such groups of samples.
        segments: Number of groups of rows of a sample. Small batches need several to fill the GPU.
        rows: Rows of such a group.
        warps: Triton's num_warps.
    """

    columns: int
    channels: int
    chunks: int
    samples: int
    groups: int
    segments: int
    rows: int
    warps: int


def _tiles(batch: int, channels: int, height: int, width: int, most_segments: int = MOST_SEGMENTS) -> Tiles:
    # Small batches have too few programs for tiles of many channels.
    columns = _most_columns(width) if batch <= SMALL_BATCH else _columns_of_tile(channels, width)
    block = _channels_of_tile(channels, columns)
    chunks = pieces(channels, block)
    samples = max(1, min(PIXELS_PER_PROGRAM // (height * width), batch * chunks // PROGRAMS))
    groups = pieces(batch, samples)
    most = max(most_segments, height // SEGMENT_ROWS)
    wanted = max(1, min(most, height, pieces(PROGRAMS, groups * chunks)))
    rows = pieces(height, wanted)
    warps = min(16, max(1, columns * block // PER_WARP))
    return Tiles(columns, block, chunks, samples, groups, pieces(height, rows), rows, warps)


def _columns_of_tile(channels: int, width: int) -> int:
    # Rows of 28 pixels need tiles of 4, rows of 14 tiles of 2: columns beside the map take as long as those in it. But
    # few channels fill a tile only with many columns.
    widest = _most_columns(width)
    return max(_fitting(width, widest), min(widest, ELEMENTS // power_of_2(channels)))


def _most_columns(width: int) -> int:
    return min(WIDEST, power_of_2(width))


def _channels_of_tile(channels: int, columns: int) -> int:
    most = max(32, ELEMENTS // columns)
    block = max(16, power_of_2(channels))
    return block if block <= most else max(32, _fitting(channels, most))


def _fitting(size: int, most: int) -> int:
    """Returns the largest power of two of at most ``most`` that divides ``size`` with little padding."""
    while PADDING * (pieces(size, most) * most - size) > size:
        most //= 2
    return most


@dataclass(frozen=True)
class MapShape:
    """Sizes of the maps, how they are divided among programs, and the constants of the kernels.

    `most_segments` is the number of segments of the rows of a sample at most, in small batches.
    """

    batch: int
    channels: int
    height: int
    width: int
    acc: torch.dtype
    most_segments: int = MOST_SEGMENTS

    @classmethod
    def of(cls, x: Tensor) -> MapShape:
        return map_shape(*x.shape, accumulator(x))

    @cached_property
    def tiles(self) -> Tiles:
        return _tiles(self.batch, self.channels, self.height, self.width, self.most_segments)

    @cached_property
    def pixels(self) -> int:
        return self.height * self.width

    @cached_property
    def segment_pixels(self) -> int:
        """The number of pixels of a segment."""
        return self.tiles.rows * self.width

    @cached_property
    def most_sums(self) -> int:
        return bound_of_sums(self.batch, self.channels, self.width)

    @cached_property
    def programs(self) -> tuple[int]:
        """The grid of a kernel whose programs take some channels of some rows of some samples."""
        return (self.tiles.groups * self.tiles.segments * self.tiles.chunks,)

    @cached_property
    def constants(self) -> dict[str, Any]:
        return {
            "STAGES": STAGES,
            "COLUMNS": self.tiles.columns,
            "CHANNELS": self.tiles.channels,
            "ACC": TYPES[self.acc],
            "num_warps": self.tiles.warps,
        }

    @cached_property
    def pixel_constants(self) -> dict[str, Any]:
        """The constants of a kernel for which the pixels of a sample have no order."""
        return self._pixel_constants(PIXEL_CHANNELS, PIXEL_ELEMENTS)

    @cached_property
    def end_constants(self) -> dict[str, Any]:
        return {**self._pixel_constants(END_CHANNELS, END_ELEMENTS), "STAGES": END_STAGES}

    def _pixel_constants(self, channels: int, elements: int) -> dict[str, Any]:
        if self.batch <= SMALL_BATCH:
            channels, elements = FEW_CHANNELS, elements // 2
        channels = min(channels, max(16, power_of_2(self.channels)))
        return {"PIXELS": elements // channels, "CHANNELS": channels, "ACC": TYPES[self.acc]}

    @cached_property
    def end_programs(self) -> tuple[int]:
        """The grid of a kernel whose programs take some channels of a segment."""
        return (self.batch * self.tiles.segments * pieces(self.channels, self.end_constants["CHANNELS"]),)

    @cached_property
    def finish_programs(self) -> tuple[int]:
        """The grid of a kernel whose programs take some channels of a few pixels of a sample."""
        chunks = pieces(self.channels, self.pixel_constants["CHANNELS"])
        return (self.batch * pieces(self.pixels, FINISH_PIXELS) * chunks,)

    @cached_property
    def all_pixels(self) -> tuple[int]:
        """The grid of a kernel whose programs take some channels of some pixels of the batch."""
        constants = self.pixel_constants
        return (pieces(self.batch * self.pixels, constants["PIXELS"]) * pieces(self.channels, constants["CHANNELS"]),)


@lru_cache(maxsize=1024)
def map_shape(
    batch: int, channels: int, height: int, width: int, acc: torch.dtype, most_segments: int = MOST_SEGMENTS
) -> MapShape:
    return MapShape(batch, channels, height, width, acc, most_segments)


def partial_sums(x: Tensor, shape: MapShape, *sizes: int, grouped: bool = False) -> Tensor:
    """Returns a tensor for sums of segments of samples, or of groups of samples."""
    splits = (shape.tiles.groups if grouped else shape.batch) * shape.tiles.segments
    return torch.empty((splits, *sizes, shape.channels), device=x.device, dtype=shape.acc)


@cache
def head_blocks(channels: int, heads: int, acc: torch.dtype) -> tuple[int, dict[str, Any]]:
    depth = power_of_2(channels // heads)
    block = max(1, min(power_of_2(heads), 256 // depth))
    return pieces(heads, block), {"HEADS": block, "DEPTH": depth, "ACC": TYPES[acc]}


def bound_of_sums(batch: int, channels: int, width: int) -> int:
    """Returns an upper bound of the number of segments of all samples.

    It is linear in the batch size, which may be a symbol to torch.compile.
    """
    columns = _columns_of_tile(channels, width) if isinstance(width, int) else 1
    return batch + PROGRAMS // pieces(channels, _channels_of_tile(channels, columns))


def kept_sums(x: Tensor, rows: int, *sizes: int) -> Tensor:
    """Returns a tensor for sums of segments of samples that is kept for the backward pass."""
    return torch.empty((rows, *sizes, x.shape[1]), device=x.device, dtype=accumulator(x))


def either(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Returns a tensor that a kernel gets but does not read, if there is none."""
    return other if tensor is None else tensor


def like_map(grad: Tensor, x: Tensor) -> Tensor:
    return grad.to(x.dtype).contiguous(memory_format=torch.channels_last)
