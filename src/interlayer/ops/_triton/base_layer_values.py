"""The scores of MRLA-base, sums of the values of all layers of a stage, and the gradients of both.

Layers in CNNs (`base_layer.py`) and in transformers (`base_tokens.py`) share them. A kernel gets the values of several
layers as a tuple of pointers, padded to a power of two; more than `GROUP` layers take several launches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .base_layer_gradients import VARYING, attended_kernel, keys_kernel, projections_kernel, values_kernel
from .light_layer_parts import heads_and_channels, projections
from .map_shape import SIZES, MapShape, either, head_blocks, like_map
from .own_gradients import new_gradient
from .runtime import TYPES, pieces, power_of_2, run_kernel

GROUP = 32  # layers whose values a kernel reads in one launch, a power of two
WRITTEN = 8  # layers for whose values a kernel writes gradients in one launch, a power of two
CHUNK = 8  # layers whose values and gradients a thread holds at once
LEAST_LAYERS = 4  # of a tuple: fewer sizes are fewer kernels to compile
THREADS = 128  # of a program
# neighboring channels of a head that a thread holds, and channels of a tile
ATTENDED_FOLD, ATTENDED_CHANNELS = 4, 256
VALUES_FOLD, VALUES_CHANNELS = 8, 512


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SIZES)
def _scores_kernel(
    pooled_ptr,  # [batch, segments, channels]: sums of x
    query_weight_ptr,  # [size]
    key_weight_ptr,  # [size]
    keys,  # of a group of earlier layers, each [batch, channels]
    query_ptr,  # [batch, channels]: q
    key_ptr,  # [batch, channels]: k of this layer
    weights_ptr,  # [batch, heads, layers]: p, or the scores if there are several groups
    channels,
    segments,
    size,
    pixels,
    heads,
    score_scale,
    number,  # of earlier layers of the group
    first_layer,
    layers,
    SOFTMAX: tl.constexpr,  # there is one group
    LAYERS: tl.constexpr,
    WIDTH: tl.constexpr,  # more than LAYERS
    HEADS: tl.constexpr,
    DEPTH: tl.constexpr,  # channels of a head
    ACC: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    head, places, inside = heads_and_channels(channels, heads, HEADS, DEPTH)
    start = sample * segments * channels
    query, key = projections(
        pooled_ptr, query_weight_ptr, key_weight_ptr, start, places, inside, channels, segments, size, pixels, ACC
    )
    places += sample * channels
    tl.store(query_ptr + places, query, mask=inside)
    tl.store(key_ptr + places, key, mask=inside)
    query = tl.where(inside, query, 0.0) * score_scale
    column = tl.arange(0, WIDTH)
    own = tl.sum(query * key, 1)
    scores = tl.where((column == number)[None, :], own[:, None], float("-inf"))
    for layer in tl.static_range(LAYERS):
        known = inside & (places * 0 + layer < number)
        score = tl.sum(query * tl.load(keys[layer] + places, mask=known, other=0.0).to(ACC), 1)
        scores = tl.where(((column == layer) & (column < number))[None, :], score[:, None], scores)
    if SOFTMAX:
        scores = tl.exp(scores - tl.max(scores, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    there = tl.where(column < number, first_layer + column, layers - 1)
    store = weights_ptr + (sample * heads + head)[:, None] * layers + there[None, :]
    tl.store(store, scores, mask=(head < heads)[:, None] & (column <= number)[None, :])


def groups_of_layers(layers: int, most: int | None = None) -> Iterator[tuple[int, int]]:
    """Yields the first layer of each group, and the one after its last."""
    size = min(GROUP, most or GROUP)
    for first in range(0, layers, size):
        yield first, min(first + size, layers)


def size_of_tuple(number: int) -> int:
    """Returns the size of the tuple for some layers."""
    return max(LEAST_LAYERS, power_of_2(number))


def padded(tensors: Sequence[Tensor], size: int) -> tuple[Tensor, ...]:
    return (*tensors, *(tensors[0],) * (size - len(tensors)))


def folded_constants(shape: MapShape, heads: int, fold: int, channels: int) -> dict[str, Any]:
    """Returns the constants of a kernel that folds the channels. A thread holds one fold of one pixel at once.

    Args:
        shape: The sizes of the map.
        heads: The number of heads.
        fold: The most channels of a fold.
        channels: The most channels of a tile.
    """
    fold = math.gcd(fold, shape.channels // heads)
    folds = min(channels, max(16, power_of_2(shape.channels))) // fold
    return {"PIXELS": max(1, THREADS // folds), "FOLDS": folds, "FOLD": fold, "ACC": TYPES[shape.acc]}


def compute_scores(
    pooled: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    keys: Sequence[Tensor],
    heads: int,
    shape: MapShape,
    segments: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q and k, [B, C], and the attention weights, [B, heads, t], given the sums of x, [B * segments, C]."""
    layers = len(keys) + 1
    query, key = torch.empty((2, shape.batch, shape.channels), device=pooled.device, dtype=shape.acc).unbind()
    weights = torch.empty((shape.batch, heads, layers), device=pooled.device, dtype=shape.acc)
    blocks, constants = head_blocks(shape.channels, heads, shape.acc)
    groups = list(groups_of_layers(layers - 1)) or [(0, 0)]
    for first, last in groups:
        bucket = size_of_tuple(last - first) if last else 0
        run_kernel(
            _scores_kernel, (shape.batch, blocks),
            pooled, query_weight, key_weight, padded(keys[first:last], bucket) if last else None, query, key, weights,
            shape.channels, segments, query_weight.shape[-1], shape.pixels, heads,
            (shape.channels // heads) ** -0.5, last - first, first, layers,
            SOFTMAX=len(groups) == 1, LAYERS=bucket, WIDTH=max(1, 2 * bucket), **constants,
        )  # fmt: skip
    return query, key, weights if len(groups) == 1 else weights.softmax(-1)


def folded_programs(shape: MapShape, constants: dict[str, Any]) -> tuple[int]:
    chunks = pieces(shape.channels, constants["FOLDS"] * constants["FOLD"])
    return (shape.batch * shape.tiles.segments * chunks,)


def add_values(
    grad: Tensor | None,
    values: Sequence[Tensor],
    group: tuple[int, int],
    weights: Tensor,
    table: Tensor | None,
    mask: Tensor | None,
    output: Tensor | None,
    sums: Tensor | None,
    heads: int,
    shape: MapShape,
    relu: bool,
) -> None:
    """Adds the values of a group of layers to `output`, and after the last layer computes `sums` if they are given."""
    first, last = group
    bucket, layers = size_of_tuple(last - first), weights.shape[-1]
    constants = folded_constants(shape, heads, ATTENDED_FOLD, ATTENDED_CHANNELS)
    assert output is not None
    run_kernel(
        attended_kernel, folded_programs(shape, constants),
        either(grad, output), padded(values[first:last], bucket), weights, either(table, weights), either(mask,
        weights),
        output, either(sums, weights),
        shape.pixels, shape.tiles.rows * shape.width, shape.tiles.segments, shape.channels, heads,
        last - first, first, layers,
        SUMS=sums is not None and last == layers, MASKED=mask is not None, ACTIVATION=relu, LAYERS=bucket, **constants,
    )  # fmt: skip


def value_gradients(
    grad: Tensor,
    values: Sequence[Tensor],
    weights: Tensor,
    received: Sequence[Tensor | None],
    own: Sequence[bool],
    stack: Tensor | None,
    mask: Tensor | None,
    heads: int,
    shape: MapShape,
    *,
    norm: tuple[Tensor, Tensor, Tensor] | None,
    relu: bool = False,
    training: bool = False,
    prefix: int = 0,
) -> tuple[list[Tensor], Tensor, int]:
    """Returns the gradients of all values, the sums of dO V_s by folds of channels, and the channels of a fold.

    Args:
        grad: The gradient of x'.
        values: V_s of all layers.
        weights: p, [B, heads, t].
        received: The gradients of V_s from later layers.
        own: Which of them may be overwritten.
        stack: Where to write the gradients of all layers but the last, or None.
        mask: m, or None.
        heads: The number of heads.
        shape: The sizes of the map.
        norm: O, and the table and the gradient's sums of its norm, or None if O is not normalized.
        relu: Whether a ReLU follows the norm.
        training: Whether the norm is in training.
        prefix: The number of tokens before the pixels of a sample in `grad`.
    """
    constants = folded_constants(shape, heads, VALUES_FOLD, VALUES_CHANNELS)
    fold, segments, layers = constants["FOLD"], shape.tiles.segments, len(values)
    sizes = (shape.batch * segments, layers, shape.channels // fold)
    products = torch.empty(sizes, device=grad.device, dtype=shape.acc)
    given, results = gradient_results(values, received, own, stack)
    output, table, sums = norm or (grad, weights, weights)
    for first, last in groups_of_layers(layers, WRITTEN):
        bucket = size_of_tuple(last - first)
        run_kernel(
            values_kernel, folded_programs(shape, constants),
            grad, output, padded(values[first:last], bucket),
            *gradient_tuples(given[first:last], results[first:last], bucket),
            weights, table, sums, either(mask, weights), products,
            shape.pixels, shape.segment_pixels, segments, shape.channels, heads, float(shape.batch * shape.pixels),
            last - first, first, layers, bits_of(given[first:last]), prefix,
            NORM=norm is not None, MASKED=mask is not None, ACTIVATION=relu, TRAINING=training, LAYERS=bucket,
            CHUNK=min(CHUNK, bucket), **constants,
        )  # fmt: skip
    return results, products, fold


def gradient_results(
    tensors: Sequence[Tensor], received: Sequence[Tensor | None], own: Sequence[bool], stack: Tensor | None = None
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Returns the gradients received from later layers, laid out as the tensors, and where to write the new ones.

    If a stack is given, those of all layers but the last are written there.
    """
    given = [
        grad if grad is None or mine else _like(grad, tensor)
        for tensor, grad, mine in zip(tensors, received, own, strict=True)
    ]
    if stack is not None:
        return given, [*stack.unbind(), new_gradient(tensors[-1])]
    results = [
        grad if mine and grad is not None else new_gradient(tensor)
        for tensor, grad, mine in zip(tensors, given, own, strict=True)
    ]
    return given, results


def _like(grad: Tensor, tensor: Tensor) -> Tensor:
    return like_map(grad, tensor) if tensor.dim() == 4 else grad.to(tensor.dtype).contiguous()


def gradient_tuples(
    given: Sequence[Tensor | None], results: Sequence[Tensor], size: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Returns the two tuples of a kernel: the gradients received, and where it writes the new ones."""
    read = [either(grad, result) for grad, result in zip(given, results, strict=True)]
    return padded(read, size), padded(results, size)


def bits_of(given: Sequence[Tensor | None]) -> int:
    return sum(1 << layer for layer, grad in enumerate(given) if grad is not None)


def score_gradients(
    products: Tensor,
    weights: Tensor,
    received: Sequence[Tensor | None],
    own: Sequence[bool],
    query: Tensor,
    keys: Sequence[Tensor],
    pooled: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    heads: int,
    fold: int,
    shape: MapShape,
    pooled_segments: int,
    stack: Tensor | None = None,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Returns the gradients of earlier keys, of each pixel of x through the average, and of the weights of q and k."""
    layers, segments, size = len(keys), shape.tiles.segments, query_weight.shape[-1]
    given, results = gradient_results(keys, received[2 : 2 + layers], own[2 : 2 + layers], stack)
    grad_weights = received[1]
    grad_query = torch.empty_like(query)
    blocks, constants = head_blocks(shape.channels, heads, shape.acc)
    folds = power_of_2(shape.channels // heads // fold)
    for first, last in groups_of_layers(layers):
        bucket = size_of_tuple(last - first)
        run_kernel(
            keys_kernel, (shape.batch, blocks),
            products, weights, weights if grad_weights is None else grad_weights.contiguous(), query,
            padded(keys[first:last], bucket), *gradient_tuples(given[first:last], results[first:last], bucket),
            grad_query,
            shape.channels, segments, heads, (shape.channels // heads) ** -0.5, last - first, first, layers,
            bits_of(given[first:last]),
            RETURNED=grad_weights is not None, LAYERS=bucket, FOLDS=folds, FOLD=fold, **constants,
        )  # fmt: skip
    block = min(256, max(16, power_of_2(shape.channels)))
    chunks = pieces(shape.channels, block)
    grad_pooled = torch.empty_like(query)
    partial = torch.empty((shape.batch * chunks, 2, size), device=query.device, dtype=shape.acc)
    run_kernel(
        projections_kernel, (shape.batch, chunks),
        pooled, query_weight, key_weight, grad_query, results[-1], grad_pooled, partial,
        shape.channels, pooled_segments, size, shape.pixels, CHANNELS=block, ACC=TYPES[shape.acc],
    )  # fmt: skip
    of_query, of_key = partial.sum(0)
    return (
        results[:-1],
        grad_pooled,
        of_query.to(query_weight.dtype).reshape(query_weight.shape),
        of_key.to(key_weight.dtype).reshape(key_weight.shape),
    )
