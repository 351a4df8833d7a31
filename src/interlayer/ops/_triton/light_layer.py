"""Fused kernels of a layer with MRLA-light: the end of the block, the attention, its norm and the sum.

The maps are channels_last. A program takes some channels of some rows of one or several samples, so that sums over the
pixels of a sample need no atomic additions. With z the output of the last convolution, the forward pass runs

    moments      statistics of z                                                       reads z
    end          x = ReLU(BN(z) + s) and its sums by sample and channel                 reads z, s; writes x
    gate         y, q, k and the gates
    attention    O = gate V + lambda O', and its statistics                            reads x, O'; writes O
    sum          x' = x + m BN(O)                                                      reads x, O; writes x'

and the backward pass, for the gradients g of x' and dO of O from the next layer,

    reduce       sums of m g and m g O^                                                reads g, O
    gradient     dx without dy, 0 where x = 0; dO'; dgate and the gradients of the     reads g, O, dO, z, s, O';
                 3x3 weight, of lambda and of the norms                                writes dx, dO'
    scores       gradients of the scores, y, and the weights of q and k
    weights      sums over programs
    finish       adds dy; dz and ds                                                    reads dx, z, s; writes dz, ds

x is computed again from z and s instead of being saved, and V is never stored. In the published reading O' is the
shortcut s, so that finish reads g and O again for ds instead of gradient writing dO'. Without an end, x is read instead
of z and s. A norm that uses its running statistics has no moments; if it is that of O, attention writes x' itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..choice import AUTO, current
from ..dispatch import TRACED
from ..residual_end import BatchNormArguments
from . import batch_norm
from .batch_norm import accumulator, running_statistics, scale_and_shift, store_moments, store_table
from .light_layer_gradients import (
    finish_kernel,
    gradient_kernel,
    pooled_kernel,
    scores_kernel,
    weights_kernel,
)
from .light_layer_parts import (
    append,
    block_output,
    gates_of_channels,
    load_gate,
    program_and_channels,
    projections,
    relu,
    three_weights,
)
from .runtime import (
    INTERPRETED,
    TYPES,
    DifferentiableOperator,
    device_unsupported_reason,
    is_channels_last,
    is_traced_otherwise,
    pieces,
    power_of_2,
    run_kernel,
)

if TYPE_CHECKING:
    from ..light_layer import BlockEnd

STATISTICS = ("running_mean", "running_var", "end_running_mean", "end_running_var")
NO_NORM = BatchNormArguments(None, None, None, None, training=False)  # type: ignore[arg-type]
# Sizes of tiles and numbers of tiles loaded ahead, measured on an H200 with the maps of ResNet-50.
ELEMENTS = 512  # of a tile: pixels of a row times channels
WIDEST = 8  # pixels of a row that a program holds at once
PER_WARP = 128  # elements of a tile
STAGES = 4  # rows that are loaded ahead
PIXELS = 16  # that a program holds at once if it has no rows
END_PIXELS = 32
END_STAGES = 3
FINISH_STAGES = 1
FINISH_PIXELS = 256  # of a program
PIXELS_PER_PROGRAM = 784  # of small maps, as many as are wanted
PROGRAMS = 2 if INTERPRETED else 528  # as many as are wanted: four for each multiprocessor of an H200
SMALL_BATCH = 16
MOST_SEGMENTS = 8  # of the rows of a sample, in small batches


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


def _tiles(batch: int, channels: int, height: int, width: int) -> Tiles:
    columns = min(WIDEST, power_of_2(width))
    block = _channels_of_tile(channels, columns)
    chunks = pieces(channels, block)
    samples = max(1, min(PIXELS_PER_PROGRAM // (height * width), batch * chunks // PROGRAMS))
    groups = pieces(batch, samples)
    wanted = max(1, min(MOST_SEGMENTS, height, pieces(PROGRAMS, groups * chunks)))
    rows = pieces(height, wanted)
    warps = min(16, max(1, columns * block // PER_WARP))
    return Tiles(columns, block, chunks, samples, groups, pieces(height, rows), rows, warps)


def _channels_of_tile(channels: int, columns: int) -> int:
    return min(max(16, power_of_2(channels)), max(32, ELEMENTS // columns))


@triton.jit
def _end_kernel(
    z_ptr,  # [batch, height, width, channels]
    s_ptr,  # [batch, height, width, channels]
    table_ptr,  # [4, channels]
    x_ptr,  # [batch, height, width, channels]
    sums_ptr,  # [batch, segments, channels]: sums of x
    active_ptr,  # [batch, segments, 2, channels]: number of pixels where x > 0, and the sum of z - mean there
    gamma_ptr,  # [channels], and three more tensors of the norm of z
    beta_ptr,
    running_mean_ptr,
    running_var_ptr,
    output_gamma_ptr,  # [channels], and three more tensors of the norm of O
    output_beta_ptr,
    output_running_mean_ptr,
    output_running_var_ptr,
    pixels,
    pixels_per_segment,
    segments,
    channels,
    eps,
    output_eps,
    END: tl.constexpr,
    RUNNING: tl.constexpr,  # both norms use their running statistics: store the tables of z and of O in table_ptr
    SHORTCUT: tl.constexpr,
    RELU: tl.constexpr,
    ACTIVE: tl.constexpr,
    STAGES: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    program, columns = program_and_channels(channels, CHANNELS)
    inside = columns < channels
    start = (program // segments).to(tl.int64) * pixels * channels
    z_ptr += start
    s_ptr += start
    x_ptr += start
    first = (program % segments) * pixels_per_segment
    last = tl.minimum(first + pixels_per_segment, pixels)
    mean = tl.zeros([CHANNELS], ACC)
    scale = mean
    shift = mean
    if RUNNING:
        mean, variance = running_statistics(running_mean_ptr, running_var_ptr, columns, inside, ACC)
        scale, shift = scale_and_shift(gamma_ptr, beta_ptr, columns, inside, mean, variance, eps, ACC)
        if program == 0:
            store_table(table_ptr, gamma_ptr, beta_ptr, columns, inside, channels, mean, variance, eps, ACC)
            other, variance = running_statistics(output_running_mean_ptr, output_running_var_ptr, columns, inside, ACC)
            store_table(
                table_ptr + 4 * channels, output_gamma_ptr, output_beta_ptr, columns, inside, channels, other,
                variance, output_eps, ACC,
            )  # fmt: skip
    elif END:
        mean = tl.load(table_ptr + columns, mask=inside, other=0.0)
        scale = tl.load(table_ptr + 2 * channels + columns, mask=inside, other=0.0)
        shift = tl.load(table_ptr + 3 * channels + columns, mask=inside, other=0.0)
    total = tl.zeros([PIXELS, CHANNELS], ACC)
    number = tl.zeros([PIXELS, CHANNELS], ACC)
    active = tl.zeros([PIXELS, CHANNELS], ACC)
    for pixel in tl.range(first, last, PIXELS, num_stages=STAGES):
        lines = pixel + tl.arange(0, PIXELS)
        mask = (lines < last)[:, None] & inside[None, :]
        places = lines[:, None] * channels + columns[None, :]
        x = tl.load(z_ptr + places, mask=mask, other=0.0).to(ACC)
        if END:
            z = x - mean[None, :]
            x, alive, _ = block_output(x, s_ptr, places, mask, scale, shift, scale, shift, SHORTCUT, False, RELU, ACC)
            tl.store(x_ptr + places, x.to(x_ptr.dtype.element_ty), mask=mask)
            if ACTIVE:
                number += tl.where(alive, 1.0, 0.0)
                active += tl.where(alive, z, 0.0)
        total += x
    program = program.to(tl.int64)
    tl.store(sums_ptr + program * channels + columns, tl.sum(total, 0), mask=inside)
    if ACTIVE:
        tl.store(active_ptr + program * 2 * channels + columns, tl.sum(number, 0), mask=inside)
        tl.store(active_ptr + (program * 2 + 1) * channels + columns, tl.sum(active, 0), mask=inside)


@triton.jit
def _gate_kernel(
    pooled_ptr,  # [batch, segments, channels]: sums of x
    query_ptr,  # [size]
    key_ptr,  # [size]
    gate_ptr,  # [batch, heads]
    total_ptr,  # [batch, channels]: sums of x over the segments
    channels,
    segments,
    size,
    pixels,
    heads,
    score_scale,
    TOTAL: tl.constexpr,
    HEADS: tl.constexpr,
    DEPTH: tl.constexpr,  # channels of a head
    ACC: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    depth = channels // heads
    within = tl.arange(0, DEPTH)
    places = head[:, None] * depth + within[None, :]
    inside = (head < heads)[:, None] & (within < depth)[None, :]
    start = sample * segments * channels
    query, key = projections(
        pooled_ptr, query_ptr, key_ptr, start, places, inside, channels, segments, size, pixels, ACC
    )
    score = tl.sum(tl.where(inside, query * key, 0.0), 1) * score_scale
    tl.store(gate_ptr + sample * heads + head, 1.0 / (1.0 + tl.exp(-score)), mask=head < heads)
    if TOTAL:
        total = tl.zeros([HEADS, DEPTH], ACC)
        for segment in range(segments):
            total += tl.load(pooled_ptr + start + segment * channels + places, mask=inside, other=0.0)
        tl.store(total_ptr + sample * channels + places, total, mask=inside)


@triton.jit(do_not_specialize=["number_earlier", "first_earlier", "layers"])
def _attention_kernel(
    x_ptr,  # [batch, height, width, channels]
    previous_ptr,  # [batch, height, width, channels]
    weight_ptr,  # [channels, 9]
    decay_ptr,  # [channels]
    gate_ptr,  # [batch, heads, layers]: the last one is the gate of this layer
    mask_ptr,  # [batch]
    table_ptr,  # [4, channels]: of the norm of O, if it uses its running statistics
    output_ptr,  # [batch, height, width, channels]: O
    moments_ptr,  # [groups * segments, 3, channels]: those of O
    sum_ptr,  # [batch, height, width, channels]: x'
    pooled_ptr,  # [batch, segments, channels]: sums of x
    query_ptr,  # [size]
    key_ptr,  # [size]
    height,
    width,
    channels,
    heads,
    batch,
    samples,
    segments,
    rows,
    size,
    score_scale,
    # Only in a layer with MRLA-base, in which the gates are the attention weights (see `base_layer.py`)
    value_ptr,  # [batch, height, width, channels]: V
    earlier,  # values of earlier layers, each [batch, height, width, channels]
    number_earlier,
    first_earlier,  # the layer of the first one
    layers,
    GATED: tl.constexpr,
    DEPTH: tl.constexpr,  # channels of a head, if the gates are computed here, else 0
    PREVIOUS: tl.constexpr,
    DECAY: tl.constexpr,
    MASKED: tl.constexpr,
    MOMENTS: tl.constexpr,  # the norm of O is in training: store the moments instead of x'
    STAGES: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EARLIER: tl.constexpr,  # the size of the tuple, at least their number
    VALUE: tl.constexpr,  # store V; O is only stored for its norm
    ACTIVATION: tl.constexpr,  # a ReLU follows the norm of O
    ACC: tl.constexpr,
):
    program, columns = program_and_channels(channels, CHANNELS)
    inside = columns < channels
    earliest = (program // segments) * samples
    number = tl.minimum(batch - earliest, samples)
    first = (program % segments) * rows
    last = tl.minimum(first + rows, height)
    begin = tl.maximum(first - 1, 0)
    stride = width * channels
    w00, w01, w02 = three_weights(weight_ptr, 0, columns, inside, ACC)
    w10, w11, w12 = three_weights(weight_ptr, 3, columns, inside, ACC)
    w20, w21, w22 = three_weights(weight_ptr, 6, columns, inside, ACC)
    decay = tl.full([CHANNELS], 1.0, ACC)
    if DECAY:
        decay = tl.load(decay_ptr + columns, mask=inside, other=0.0).to(ACC)
    scale = decay
    shift = decay
    if not MOMENTS:
        scale = tl.load(table_ptr + 2 * channels + columns, mask=inside, other=0.0)
        shift = tl.load(table_ptr + 3 * channels + columns, mask=inside, other=0.0)
    pivot = tl.zeros([CHANNELS], ACC)
    if MOMENTS:
        # O at the first pixel, so that sums of squares do not cancel if the mean is large
        start = earliest.to(tl.int64) * height * stride
        for offset in tl.static_range(9):
            row, column = first + offset // 3 - 1, offset % 3 - 1
            rows_here, columns_here = columns * 0 + row, columns * 0 + column
            known = inside & (rows_here >= 0) & (rows_here < height) & (columns_here >= 0) & (columns_here < width)
            value = tl.load(x_ptr + start + row * stride + column * channels + columns, mask=known, other=0.0)
            pivot += value.to(ACC) * tl.load(weight_ptr + columns * 9 + offset, mask=inside, other=0.0).to(ACC)
        if GATED:
            pivot *= load_gate(gate_ptr, earliest, columns, inside, channels, heads, layers, layers - 1, ACC)
        for layer in tl.static_range(EARLIER):
            known = inside & (columns * 0 + layer < number_earlier)
            value = tl.load(earlier[layer] + start + first * stride + columns, mask=known, other=0.0).to(ACC)
            own = first_earlier + layer
            pivot += value * load_gate(gate_ptr, earliest, columns, known, channels, heads, layers, own, ACC)
        if PREVIOUS:
            pivot += decay * tl.load(previous_ptr + start + first * stride + columns, mask=inside, other=0.0).to(ACC)
    total = tl.zeros([COLUMNS, CHANNELS], ACC)
    squares = tl.zeros([COLUMNS, CHANNELS], ACC)
    for index in range(number):
        sample = earliest + index
        start = sample.to(tl.int64) * height * stride  # within a sample, offsets of 32 bits suffice
        x_here = x_ptr + start
        previous_here = previous_ptr + start
        output_here = output_ptr + start
        sum_here = sum_ptr + start
        gate = tl.full([CHANNELS], 1.0, ACC)
        if DEPTH > 0:
            gate = gates_of_channels(
                pooled_ptr, query_ptr, key_ptr, sample, columns, inside, channels, segments, size, height * width,
                score_scale, DEPTH, CHANNELS, ACC,
            )  # fmt: skip
            one = inside & (columns % DEPTH == 0)  # all segments store the same
            tl.store(gate_ptr + sample * heads + columns // DEPTH, gate, mask=one)
        elif GATED:
            gate = load_gate(gate_ptr, sample, columns, inside, channels, heads, layers, layers - 1, ACC)
        weights = ()
        for layer in tl.static_range(EARLIER):
            known = inside & (columns * 0 + layer < number_earlier)
            own = first_earlier + layer
            weight = load_gate(gate_ptr, sample, columns, known, channels, heads, layers, own, ACC)
            weights = append(weights, weight)
        factor = 1.0
        if MASKED:
            factor = tl.load(mask_ptr + sample).to(ACC)
        for left in range(0, width, COLUMNS):
            w = left + tl.arange(0, COLUMNS)
            across = (w < width)[:, None] & inside[None, :]
            from_left = ((w >= 1) & (w <= width))[:, None] & inside[None, :]
            from_right = (w < width - 1)[:, None] & inside[None, :]
            offsets = w[:, None] * channels + columns[None, :]
            above = tl.zeros([COLUMNS, CHANNELS], ACC)  # V of the row above, without the row below it
            here = tl.zeros([COLUMNS, CHANNELS], ACC)  # V of this row, without the rows below
            centre = tl.zeros([COLUMNS, CHANNELS], ACC)  # x of the row above
            for row in tl.range(begin, last + 1, num_stages=STAGES):
                exists = (w * 0 + row < height)[:, None]  # the interpreter splats no bool
                places = row * stride + offsets
                x0 = tl.load(x_here + places - channels, mask=from_left & exists, other=0.0).to(ACC)
                x1 = tl.load(x_here + places, mask=across & exists, other=0.0).to(ACC)
                x2 = tl.load(x_here + places + channels, mask=from_right & exists, other=0.0).to(ACC)
                above += w20[None, :] * x0 + w21[None, :] * x1 + w22[None, :] * x2
                ready = across & (w * 0 + row > first)[:, None]  # the row above is complete
                places -= stride
                output = gate[None, :] * above
                if PREVIOUS:
                    output += decay[None, :] * tl.load(previous_here + places, mask=ready, other=0.0).to(ACC)
                if VALUE:
                    tl.store(value_ptr + start + places, above.to(value_ptr.dtype.element_ty), mask=ready)
                for layer in tl.static_range(EARLIER):
                    there = ready & (w * 0 + layer < number_earlier)[:, None]
                    earlier_value = tl.load(earlier[layer] + start + places, mask=there, other=0.0).to(ACC)
                    output += weights[layer][None, :] * earlier_value
                if MOMENTS or not VALUE:
                    tl.store(output_here + places, output.to(output_ptr.dtype.element_ty), mask=ready)
                if MOMENTS:
                    difference = tl.where(ready, output - pivot[None, :], 0.0)
                    total += difference
                    squares += difference * difference
                else:
                    output = output * scale[None, :] + shift[None, :]
                    if ACTIVATION:
                        output = relu(output)
                    result = centre + factor * output
                    tl.store(sum_here + places, result.to(sum_ptr.dtype.element_ty), mask=ready)
                above = here + w10[None, :] * x0 + w11[None, :] * x1 + w12[None, :] * x2
                here = w00[None, :] * x0 + w01[None, :] * x1 + w02[None, :] * x2
                centre = x1
    if MOMENTS:
        count = (number * (last - first) * width).to(ACC)
        store_moments(
            moments_ptr, program.to(tl.int64), columns, inside, channels, count, pivot,
            tl.sum(total, 0), tl.sum(squares, 0),
        )  # fmt: skip


@triton.jit
def _sum_kernel(
    x_ptr,  # [batch, pixels, channels]
    output_ptr,  # [batch, pixels, channels]: O
    table_ptr,  # [4, channels]
    mask_ptr,  # [batch]
    sum_ptr,  # [batch, pixels, channels]: x'
    total_pixels,
    pixels,
    channels,
    MASKED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # a ReLU follows the norm of O
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    program, columns = program_and_channels(channels, CHANNELS)
    inside = columns < channels
    lines = program.to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    mask = (lines < total_pixels)[:, None] & inside[None, :]
    places = lines[:, None] * channels + columns[None, :]
    scale = tl.load(table_ptr + 2 * channels + columns, mask=inside, other=0.0)
    shift = tl.load(table_ptr + 3 * channels + columns, mask=inside, other=0.0)
    output = tl.load(output_ptr + places, mask=mask, other=0.0).to(ACC) * scale[None, :] + shift[None, :]
    if ACTIVATION:
        output = relu(output)
    if MASKED:
        output *= tl.load(mask_ptr + lines // pixels, mask=lines < total_pixels, other=0.0).to(ACC)[:, None]
    output += tl.load(x_ptr + places, mask=mask, other=0.0).to(ACC)
    tl.store(sum_ptr + places, output.to(sum_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class _Shape:
    """Sizes of the maps, how they are divided among programs, and the constants of the kernels."""

    batch: int
    channels: int
    height: int
    width: int
    acc: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> _Shape:
        return _shape(*x.shape, accumulator(x))

    @cached_property
    def tiles(self) -> Tiles:
        return _tiles(self.batch, self.channels, self.height, self.width)

    @cached_property
    def pixels(self) -> int:
        return self.height * self.width

    @cached_property
    def segment_pixels(self) -> int:
        """The number of pixels of a segment."""
        return self.tiles.rows * self.width

    @cached_property
    def most_sums(self) -> int:
        return _most_sums(self.batch, self.channels, self.width)

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
        channels = min(64, max(16, power_of_2(self.channels)))
        return {"PIXELS": PIXELS, "CHANNELS": channels, "ACC": TYPES[self.acc]}

    @cached_property
    def end_constants(self) -> dict[str, Any]:
        return {**self.pixel_constants, "PIXELS": END_PIXELS, "STAGES": END_STAGES}

    @cached_property
    def pixel_programs(self) -> tuple[int]:
        """The grid of a kernel whose programs take some channels of a segment."""
        return (self.batch * self.tiles.segments * pieces(self.channels, self.pixel_constants["CHANNELS"]),)

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
def _shape(batch: int, channels: int, height: int, width: int, acc: torch.dtype) -> _Shape:
    return _Shape(batch, channels, height, width, acc)


def _partial(x: Tensor, shape: _Shape, *sizes: int, grouped: bool = False) -> Tensor:
    """Returns a tensor for sums of segments of samples, or of groups of samples."""
    splits = (shape.tiles.groups if grouped else shape.batch) * shape.tiles.segments
    return torch.empty((splits, *sizes, shape.channels), device=x.device, dtype=shape.acc)


@cache
def _head_blocks(channels: int, heads: int, acc: torch.dtype) -> tuple[int, dict[str, Any]]:
    depth = power_of_2(channels // heads)
    block = max(1, min(power_of_2(heads), 256 // depth))
    return pieces(heads, block), {"HEADS": block, "DEPTH": depth, "ACC": TYPES[acc]}


def _most_sums(batch: int, channels: int, width: int) -> int:
    """Returns an upper bound of the number of segments of all samples.

    It is linear in the batch size, which may be a symbol to torch.compile.
    """
    columns = min(WIDEST, power_of_2(width)) if isinstance(width, int) else 1
    return batch + PROGRAMS // pieces(channels, _channels_of_tile(channels, columns))


def _kept_sums(x: Tensor, rows: int, *sizes: int) -> Tensor:
    """Returns a tensor for sums of segments of samples that is kept for the backward pass."""
    return torch.empty((rows, *sizes, x.shape[1]), device=x.device, dtype=accumulator(x))


class End(NamedTuple):
    """What `run_end` returns.

    Args:
        x: The output of the block.
        pooled: Sums of x by sample, segment and channel.
        active: Of the pixels where x > 0, their number and the sum of z - mean, or None if they are not needed.
        table: The table of the norm of O, or None if it is in training.
        end_table: The table of the norm of z, or None without an end.
    """

    x: Tensor
    pooled: Tensor
    active: Tensor | None
    table: Tensor | None
    end_table: Tensor | None


def run_end(
    x: Tensor,
    shortcut: Tensor | None,
    norm: BatchNormArguments,
    end: BatchNormArguments | None,
    relu: bool,
    shape: _Shape,
    *,
    pooled: bool,
    differentiated: bool,
) -> End:
    """Computes the end of a block, sums of its output, and the tables of the norms.

    Args:
        x: The output of the block, or z if there is an end.
        shortcut: s, or None.
        norm: The norm of O.
        end: The norm of z, or None if x is the output of the block.
        relu: Whether the block ends with a ReLU.
        shape: The sizes of the map.
        pooled: Whether the sums are needed.
        differentiated: Whether there may be a backward pass.
    """
    stored = x if end is None else torch.empty_like(x)
    running: tuple[Tensor, ...] = ()  # the tensors of both norms, if this kernel computes their tables
    tables: Tensor | None
    if end is not None and not norm.training and not end.training:
        running = *end.tensors, *norm.tensors
        tables = torch.empty((2, 4, shape.channels), device=x.device, dtype=shape.acc)
        end_table, table = tables
    else:
        table, end_table = _running_tables(norm, end, shape.acc)
        tables = end_table
    if end is not None and end.training:
        tables = end_table = batch_norm.batch_table(batch_norm.moments_of(x), end, shape.batch * shape.pixels)
    sums = _kept_sums(x, shape.most_sums)
    active = _kept_sums(x, shape.most_sums, 2) if end is not None and differentiated else None
    if pooled or end is not None:
        run_kernel(
            _end_kernel, shape.pixel_programs,
            x, _or(shortcut, x), _or(tables, sums), stored, sums, _or(active, sums), *(running or (sums,) * 8),
            shape.pixels, shape.segment_pixels, shape.tiles.segments, shape.channels,
            norm.eps if end is None else end.eps, norm.eps,
            END=end is not None, RUNNING=bool(running), SHORTCUT=shortcut is not None, RELU=relu,
            ACTIVE=active is not None, **shape.end_constants,
        )  # fmt: skip
    return End(stored, sums, active, table, end_table)


def _forward(
    x: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    value_weight: Tensor,
    previous: Tensor | None,
    decay: Tensor | None,
    mask: Tensor | None,
    shortcut: Tensor | None,
    source: Tensor | None,  # the input of the norm of the shortcut
    source_table: Tensor | None,  # the table of that norm
    norm_weight: Tensor,
    norm_bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    end_weight: Tensor | None,
    end_bias: Tensor | None,
    end_running_mean: Tensor | None,
    end_running_var: Tensor | None,
    heads: int,
    relu: bool,
    is_shortcut: bool,  # the shortcut is O', and `previous` is None
    training: bool,
    momentum: float,
    eps: float,
    end_training: bool,
    end_momentum: float,
    end_eps: float,
    differentiated: bool,
) -> tuple[Tensor | None, ...]:
    """Returns x', O and the gates; and sums of x, sums where x > 0, and the tables of the norms of O and of the end."""
    norm = BatchNormArguments(norm_weight, norm_bias, running_mean, running_var, training, momentum, eps)  # type: ignore[arg-type]
    end = None
    if end_weight is not None:
        end = BatchNormArguments(
            end_weight, end_bias, end_running_mean, end_running_var, end_training, end_momentum, end_eps  # type: ignore[arg-type]
        )  # fmt: skip
    previous = shortcut if is_shortcut else previous
    shape = _Shape.of(x)
    rows, tiles = shape.batch * shape.pixels, shape.tiles
    stored, pooled, active, table, end_table = run_end(
        x, shortcut, norm, end, relu, shape, pooled=query_weight is not None, differentiated=differentiated
    )
    gate, depth = None, 0
    if query_weight is not None and key_weight is not None:
        gate = torch.empty((shape.batch, heads), device=x.device, dtype=shape.acc)
        depth = 0 if training else _depth_inside_tile(shape, heads)
        if not depth:
            _compute_gates(pooled, query_weight, key_weight, gate, shape, tiles.segments)
    output = torch.empty_like(x)
    result = torch.empty_like(x) if not training else output
    moments = _partial(x, shape, 3, grouped=True) if training else pooled
    run_kernel(
        _attention_kernel, shape.programs,
        stored, _or(previous, x), value_weight, _or(decay, pooled), _or(gate, pooled), _or(mask, pooled),
        _or(table, pooled), output, moments, result, pooled, _or(query_weight, pooled), _or(key_weight, pooled),
        shape.height, shape.width, shape.channels, heads, shape.batch, tiles.samples, tiles.segments, tiles.rows,
        1 if query_weight is None else query_weight.shape[-1], (shape.channels // heads) ** -0.5,
        output, None, 0, 0, 1,
        GATED=gate is not None, DEPTH=depth, PREVIOUS=previous is not None, DECAY=decay is not None,
        MASKED=mask is not None, MOMENTS=training, EARLIER=0, VALUE=False, ACTIVATION=False, **shape.constants,
    )  # fmt: skip
    if training:
        table = batch_norm.batch_table(moments, norm, rows)
        result = torch.empty_like(x)
        run_kernel(
            _sum_kernel, shape.all_pixels,
            stored, output, table, _or(mask, pooled), result, rows, shape.pixels, shape.channels,
            MASKED=mask is not None, ACTIVATION=False, **shape.pixel_constants,
        )  # fmt: skip
    return (
        result, output, gate, pooled if differentiated else None, active,
        table if differentiated or training else None, end_table if differentiated or end_training else None,
    )  # fmt: skip


def _fake(x: Tensor, query_weight: Tensor | None, *args: Any) -> tuple[Tensor | None, ...]:
    """Returns tensors like those of `_forward`, without values."""
    end_weight, end_running_mean = args[12], args[14]
    heads, training, end_training, differentiated = args[16], args[19], args[22], args[25]
    batch, channels, _, width = x.shape
    acc, sums = accumulator(x), _most_sums(batch, channels, width)

    def table(training: bool, running: Tensor | None) -> Tensor | None:
        rows = 5 if training and running is None else 4
        return x.new_empty((rows, channels), dtype=acc) if differentiated or training else None

    return (
        torch.empty_like(x),
        torch.empty_like(x),
        None if query_weight is None else x.new_empty((batch, heads), dtype=acc),
        _kept_sums(x, sums) if differentiated else None,
        _kept_sums(x, sums, 2) if differentiated and end_weight is not None else None,
        table(training, args[10]),
        table(end_training, end_running_mean) if end_weight is not None else None,
    )


def _backward(
    arguments: tuple[Any, ...], results: tuple[Tensor | None, ...], grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the tensors among the arguments of `_forward`."""
    (
        x, query_weight, key_weight, value_weight, previous, decay, mask, shortcut, source, source_table,
        norm_weight, _, _, _, end_weight, _, _, _, heads, relu, is_shortcut, training, _, _, end_training, _, _,
    ) = arguments  # fmt: skip
    _, output, gate, pooled, active, table, end_table = results
    grad, grad_next, grad_gate = grads
    assert output is not None
    assert pooled is not None
    assert table is not None
    projected = source is not None  # `shortcut` is then the source as well
    previous = shortcut if is_shortcut else previous
    has_end = end_weight is not None
    flags = {"END": has_end, "SHORTCUT": shortcut is not None, "PROJECTED": projected, "RELU": relu}
    shape = _Shape.of(x)
    tiles, rows = shape.tiles, shape.batch * shape.pixels
    grad = torch.zeros_like(x) if grad is None else _as(grad, x)
    grad_next = None if grad_next is None else _as(grad_next, x)

    norm_sums = batch_norm.gradient_sums(grad, output, table, mask)
    grad_x = torch.empty_like(x)
    separate = previous is not None and not is_shortcut
    grad_previous = torch.empty_like(x) if separate else None
    products = _partial(x, shape, 12, grouped=True)
    grad_gates = _partial(x, shape)
    switches = {
        "NEXT": grad_next is not None, "GATED": gate is not None, "IS_SHORTCUT": is_shortcut,
        "DECAY": decay is not None, "MASKED": mask is not None, "TRAINING": training, **flags,
    }  # fmt: skip
    run_kernel(
        gradient_kernel, shape.programs,
        grad, output, _or(grad_next, grad), x, _or(shortcut, x), _or(previous, x), value_weight, _or(gate, table),
        _or(decay, table), _or(mask, table), table, _or(end_table, table), _or(source_table, table), norm_sums,
        grad_x, _or(grad_previous, grad_x), grad_gates, products,
        shape.height, shape.width, shape.channels, heads, shape.batch, tiles.samples, tiles.segments, tiles.rows,
        float(rows),
        PREVIOUS=previous is not None, DIRECT=False, **switches, **shape.constants,
    )  # fmt: skip
    grad_pooled, grad_query, grad_key = pooled, None, None
    if gate is not None:
        grad_pooled, grad_weights = _gate_gradients(
            grad_gates, pooled, query_weight, key_weight, gate, grad_gate, heads, shape, tiles.segments
        )
        grad_query, grad_key = grad_weights.sum(0)
        grad_query = grad_query.to(query_weight.dtype).reshape(query_weight.shape)
        grad_key = grad_key.to(key_weight.dtype).reshape(key_weight.shape)
    kinds = 12 if has_end else 10
    sums_of_weights = torch.empty((kinds, shape.channels), device=x.device, dtype=shape.acc)
    block = min(32, max(16, power_of_2(shape.channels)))
    run_kernel(
        weights_kernel, (kinds, pieces(shape.channels, block)),
        products, _or(active, products), grad_pooled, _or(end_table, table), sums_of_weights,
        shape.channels, len(products), shape.batch * tiles.segments, tiles.segments,
        GATED=gate is not None, SPLITS=32, CHANNELS=block, ACC=TYPES[shape.acc],
    )  # fmt: skip
    grad_shortcut = None if shortcut is None else torch.empty_like(x)
    if has_end or gate is not None:
        partial = grad_x
        grad_x = torch.empty_like(x)
        run_kernel(
            finish_kernel, shape.finish_programs,
            partial, x, _or(shortcut, x), grad, output, _or(grad_next, grad), _or(decay, table), _or(mask, table),
            table, norm_sums, _or(end_table, table), _or(source_table, table), sums_of_weights, grad_pooled,
            grad_x, _or(grad_shortcut, grad_x),
            shape.pixels, FINISH_PIXELS, pieces(shape.pixels, FINISH_PIXELS), shape.channels, float(rows),
            END_TRAINING=end_training, STAGES=FINISH_STAGES, **switches, **shape.pixel_constants,
        )  # fmt: skip
    grad_value = sums_of_weights[:9].view(value_weight.shape).to(value_weight.dtype)
    grad_decay = None if decay is None else sums_of_weights[9].to(decay.dtype)
    norm_grads = norm_sums[1].to(norm_weight.dtype), norm_sums[0].to(norm_weight.dtype), None, None
    end_grads: tuple[Tensor | None, ...] = (None,) * 4
    if has_end:
        end_grads = sums_of_weights[11].to(end_weight.dtype), sums_of_weights[10].to(end_weight.dtype), None, None
    return (
        grad_x, grad_query, grad_key, grad_value, grad_previous, grad_decay, None, grad_shortcut, None, None,
        *norm_grads, *end_grads,
    )  # fmt: skip


_layer = DifferentiableOperator(
    "light_layer",
    _forward,
    _backward,
    _fake,
    outputs=3,
    results=7,
    keep=lambda args, results: (None, *results[1:]),  # all but x'
    constant=("mask", "source", "source_table", *STATISTICS),
    unread={"shortcut": "source", **dict.fromkeys(STATISTICS)},
)


def _depth_inside_tile(shape: _Shape, heads: int) -> int:
    """Returns the channels of a head if the kernel that reads the gates computes them, else 0.

    That saves a launch, which a small batch takes longer for than for the gates, but every program computes them anew.
    """
    depth = shape.channels // heads
    fits = depth == power_of_2(depth) and depth <= shape.tiles.channels
    return depth if fits and shape.tiles.samples == 1 and shape.batch <= SMALL_BATCH else 0


def _compute_gates(
    pooled: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    gate: Tensor,
    shape: _Shape,
    segments: int,
    total: Tensor | None = None,
) -> None:
    """Computes the gates, [B, heads], given the sums of x, [B * segments, C], and their totals, [B, C], if wanted."""
    heads = gate.shape[1]
    blocks, constants = _head_blocks(shape.channels, heads, shape.acc)
    run_kernel(
        _gate_kernel, (shape.batch, blocks),
        pooled, query_weight, key_weight, gate, _or(total, pooled), shape.channels, segments, query_weight.shape[-1],
        shape.pixels, heads, (shape.channels // heads) ** -0.5, TOTAL=total is not None, **constants,
    )  # fmt: skip


def _gate_gradients(
    partial: Tensor,
    pooled: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    gate: Tensor,
    grad_gate: Tensor | None,
    heads: int,
    shape: _Shape,
    segments: int,
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of each pixel of x through the average, [B, C], and those of the weights of q and k.

    The latter are partial sums, [splits, 2, k]. The sums of x, `pooled`, are [B * segments, C].
    """
    size = query_weight.shape[-1]
    grad_score = torch.empty_like(gate)
    blocks, constants = _head_blocks(shape.channels, heads, shape.acc)
    run_kernel(
        scores_kernel, (shape.batch, blocks),
        partial, gate, gate if grad_gate is None else grad_gate.contiguous(), grad_score, shape.channels,
        shape.tiles.segments, heads, (shape.channels // heads) ** -0.5, RETURNED=grad_gate is not None, **constants,
    )  # fmt: skip
    block = min(256, max(16, power_of_2(shape.channels)))
    chunks = pieces(shape.channels, block)
    grad_pooled = torch.empty((shape.batch, shape.channels), device=gate.device, dtype=shape.acc)
    grad_weights = torch.empty((shape.batch * chunks, 2, size), device=gate.device, dtype=shape.acc)
    run_kernel(
        pooled_kernel, (shape.batch, chunks),
        pooled, query_weight, key_weight, grad_score, grad_pooled, grad_weights,
        shape.channels, segments, size, shape.pixels, heads, CHANNELS=block, ACC=TYPES[shape.acc],
    )  # fmt: skip
    return grad_pooled, grad_weights


def _running_tables(
    norm: BatchNormArguments, end: BatchNormArguments | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the tables of the norms that use their running statistics, and None for the others."""
    running = [n for n in (norm, end) if n is not None and not n.training]
    tables = list(batch_norm.running_tables(running, dtype)) if running else []
    table = None if norm.training else tables[0]
    return table, None if end is None or end.training else tables[-1]


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Returns a tensor that a kernel gets but does not read, if there is none."""
    return other if tensor is None else tensor


def _as(grad: Tensor, x: Tensor) -> Tensor:
    return grad.to(x.dtype).contiguous(memory_format=torch.channels_last)


def supports_open_end(x: Tensor) -> bool:
    """Returns whether a kernel can compute the end of a block with the input x together with its attention.

    Without a kernel there is nothing to gain, so that blocks then run unchanged.
    """
    if current() not in (AUTO, "triton") or is_traced_otherwise(x):
        return False
    reason = device_unsupported_reason(x)
    return reason is None and x.dim() == 4 and is_channels_last(x)


def unsupported_reason(
    x: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    value_weight: Tensor,
    previous: Tensor | None,
    decay: Tensor | None,
    norm: BatchNormArguments,
    mask: Tensor | None = None,
    *,
    heads: int,
    end: BlockEnd | None = None,
) -> str | None:
    shortcut = None if end is None else end.shortcut
    tensors = [query_weight, key_weight, value_weight, decay, mask, *norm.tensors]
    tensors += [] if end is None else end.norm.tensors
    if is_traced_otherwise(x, previous, shortcut, *tensors):  # checked before any size is read, which would add a guard
        return TRACED
    shape, dtype, size = x.shape, x.dtype, x.numel()
    for other in (previous, shortcut):
        if other is not None and (other.shape != shape or other.dtype != dtype):
            return "the maps must have one shape and dtype"
        if other is not None and not is_channels_last(other):
            return "the maps must be channels_last"
    if not is_channels_last(x):
        return "the maps must be channels_last"
    if dtype not in TYPES:
        return f"the maps must be of floating point, got {dtype}"
    if not size:
        return "the map is empty"
    if size // shape[0] >= 2**31:
        return "the map of one sample must have less than 2^31 elements"
    if value_weight.shape[1:] != (1, 3, 3):
        return f"the convolution of the values must be 3x3, got {tuple(value_weight.shape[1:])}"
    if (query_weight is None) != (key_weight is None):
        return "there must be both q and k, or neither"
    if query_weight is not None and not query_weight.shape[-1] % 2:
        return f"the convolutions of q and k must have an odd size, got {query_weight.shape[-1]}"
    if shape[1] % heads:
        return f"the channels must be divisible by the number of heads, got {shape[1]} and {heads}"
    training = norm.training or (end is not None and end.norm.training)
    if training and size // shape[1] < 2:
        return "a channel with a single value has no variance"
    if not all(t is None or t.is_contiguous() for t in tensors):
        return "the parameters, statistics and masks must be contiguous"
    return device_unsupported_reason(x)


def light_layer(
    x: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    value_weight: Tensor,
    previous: Tensor | None,
    decay: Tensor | None,
    norm: BatchNormArguments,
    mask: Tensor | None = None,
    *,
    heads: int,
    end: BlockEnd | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    shortcut, relu, end_norm = (None, False, NO_NORM) if end is None else (end.shortcut, end.relu, end.norm)
    is_shortcut = previous is not None and previous is shortcut
    source, source_table = (None, None) if end is None or end.source is None else end.source
    maps = (
        x, query_weight, key_weight, value_weight, None if is_shortcut else previous, decay, mask, shortcut,
        source, source_table,
    )  # fmt: skip
    numbers = (heads, relu, is_shortcut, *norm[4:], *end_norm[4:])
    if not torch.compiler.is_compiling():
        return _layer(*maps, *norm.tensors, *end_norm.tensors, *numbers)
    result, output, gate, _, _, table, end_table = _layer.traced(
        *maps, *batch_norm.operator_tensors(norm), *batch_norm.operator_tensors(end_norm), *numbers
    )
    batch_norm.update_statistics(norm, table, x)
    batch_norm.update_statistics(end_norm, end_table, x)
    return result, output, None if query_weight is None else gate
