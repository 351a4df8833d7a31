"""Fused kernels of a layer with MRLA-base in a CNN: the end of the block, the attention, its norm and the sum.

The kernels of a layer with MRLA-light (`light_layer.py`) do what both have in common. The forward pass of layer t runs

    moments      statistics of z                                                       reads z
    end          x = ReLU(BN(z) + s) and its sums by sample and channel                 reads z, s; writes x
    scores       y, q, k_t and the attention weights p
    attention    V_t, O = sum of p_s V_s, and its statistics                           reads x, V_s; writes V_t, O
    sum          x' = x + m f(BN(O))                                                   reads x, O; writes x'

and the backward pass, for the gradients g of x' and G_s of V_s from later layers,

    attended     O, and the sums of m g and m g O^                                     reads g, V_s; writes O
    values       G'_s = G_s + p_s dO, and the sums of dO V_s                           reads g, O, V_s, G_s; writes G'_s
    keys         the gradients of q and of all keys
    projections  the gradients of y and of the weights of q and k
    gradient     dx without dy, -0 where x = 0; the gradients of the 3x3 weight and    reads g, G'_t, z, s; writes dx
                 of the norm of z
    weights      sums over programs
    finish       adds dy; dz and ds                                                    reads dx, z; writes dz, ds

The only map that is saved beside z and s is V_t, which later layers read as well: x and O are computed again.

The function of layer t returns the earlier keys and values that it was given, too. Layer t + 1 reads those, so that the
gradients G_s pass through the backward passes of all layers, and each of them adds its part in place. A kernel gets the
values of several layers as a tuple of pointers, padded to a power of two. More than `GROUP` layers take several
launches. The kernel of the attention reads the values of the `NEAR` latest layers; attended adds up those before them.

For torch.compile both passes of a layer are registered as operators. The gradients G_s then pass through links (see
`linked.py`), and each layer writes new ones, one behind the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import TRACED
from ..linked import Linked, linked, new_link, new_stack, tensors_of
from ..once import once_differentiable
from ..residual_end import BatchNormArguments
from . import batch_norm
from .base_layer_gradients import VARYING, attended_kernel, keys_kernel, projections_kernel, values_kernel
from .batch_norm import SPLITS, SUM_CHANNELS, accumulator
from .light_layer import NO_NORM, STATISTICS, run_end
from .light_layer import unsupported_reason as light_unsupported_reason
from .light_layer_forward import attention_kernel, sum_kernel
from .light_layer_gradients import finish_kernel, gradient_kernel, weights_kernel
from .light_layer_parts import projections
from .map_shape import (
    FINISH_PIXELS,
    FINISH_STAGES,
    SIZES,
    MapShape,
    bound_of_sums,
    either,
    head_blocks,
    kept_sums,
    like_map,
    partial_sums,
)
from .own_gradients import may_overwrite, new_gradient, references_of_own
from .runtime import (
    TYPES,
    DifferentiableOperator,
    is_channels_last,
    is_traced_otherwise,
    pieces,
    power_of_2,
    run_kernel,
)

if TYPE_CHECKING:
    from ..light_layer import BlockEnd

GROUP = 32  # layers whose values a kernel reads in one launch, a power of two
WRITTEN = 8  # layers for whose values a kernel writes gradients in one launch, a power of two
NEAR = 8  # earlier layers whose values the kernel of the attention reads, a power of two
CHUNK = 8  # layers whose values and gradients a thread holds at once
REGISTERS = 168  # of a thread: three programs of four warps fit a multiprocessor
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
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    depth = channels // heads
    within = tl.arange(0, DEPTH)
    places = head[:, None] * depth + within[None, :]
    inside = (head < heads)[:, None] & (within < depth)[None, :]
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


class _BaseLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        value_weight: Tensor,
        mask: Tensor | None,
        shortcut: Tensor | None,
        source: Tensor | None,  # the input of the norm of the shortcut
        source_table: Tensor | None,  # the table of that norm
        heads: int,
        relu: bool,
        end_relu: bool,
        earlier: int,
        *others: Any,  # keys and values of the earlier layers, and the arguments of the norms, which autograd must see
    ) -> tuple[Tensor, ...]:
        keys, values, norms = others[:earlier], others[earlier : 2 * earlier], others[2 * earlier :]
        size = len(BatchNormArguments._fields)
        norm = BatchNormArguments(*norms[:size])
        end = BatchNormArguments(*norms[size:]) if len(norms) > size else None
        shape, layers = MapShape.of(x), earlier + 1
        rows, tiles = shape.batch * shape.pixels, shape.tiles
        needs_grad = any(ctx.needs_input_grad)
        stored, pooled, active, table, end_table = run_end(
            x, shortcut, norm, end, end_relu, shape, pooled=True, differentiated=needs_grad
        )
        query, key, weights = compute_scores(pooled, query_weight, key_weight, keys, heads, shape, tiles.segments)
        value = torch.empty_like(x)
        training = norm.training
        output = torch.empty_like(x) if training else value
        result = torch.empty_like(x) if not training else value
        moments = partial_sums(x, shape, 3, grouped=True) if training else pooled
        first = max(0, earlier - NEAR)
        far = torch.empty_like(x) if first else None
        for group in groups_of_layers(first):
            add_values(None, values, group, weights, None, None, far, None, heads, shape, relu)
        bucket = size_of_tuple(earlier - first) if earlier else 0
        run_kernel(
            attention_kernel, shape.programs,
            stored, either(far, x), value_weight, pooled, weights, either(mask, pooled),
            either(table, pooled), output, moments, result, pooled, query_weight, key_weight,
            shape.height, shape.width, shape.channels, heads, shape.batch, tiles.samples, tiles.segments, tiles.rows,
            1, 1.0, value, padded(values[first:], bucket) if earlier else None, earlier - first, first, layers,
            GATED=True, DEPTH=0, PREVIOUS=far is not None, DECAY=False, MASKED=mask is not None, MOMENTS=training,
            EARLIER=bucket, VALUE=True, ACTIVATION=relu, maxnreg=REGISTERS, **shape.constants,
        )  # fmt: skip
        if training:
            table = batch_norm.batch_table(moments, norm, rows)
            result = torch.empty_like(x)
            run_kernel(
                sum_kernel, shape.all_pixels,
                stored, output, table, either(mask, pooled), result, rows, shape.pixels, shape.channels,
                MASKED=mask is not None, ACTIVATION=relu, **shape.pixel_constants,
            )  # fmt: skip
        ctx.save_for_backward(
            x, query_weight, key_weight, value_weight, mask, shortcut if source is None else source, source_table,
            weights, query, pooled, active, table, end_table, norm.weight, None if end is None else end.weight,
            *keys, key, *values, value,
        )  # fmt: skip
        ctx.heads, ctx.relu, ctx.device = heads, relu, x.device
        ctx.flags = {"END": end is not None, "SHORTCUT": shortcut is not None}
        ctx.end_flags = {"PROJECTED": source is not None, "RELU": end_relu}
        ctx.training = training, end is not None and end.training
        ctx.stacks = None
        ctx.set_materialize_grads(False)
        return result, weights, *keys, key, *values, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *received: Tensor | None) -> Any:
        own = may_overwrite(received, ctx.device) if ctx.stacks is None else [False] * len(received)
        key_stack, value_stack = ctx.stacks or (None, None)
        (
            x, query_weight, key_weight, value_weight, mask, shortcut, source_table, weights, query, pooled, active,
            table, end_table, norm_weight, end_weight, *memory,
        ) = ctx.saved_tensors  # fmt: skip
        layers = len(memory) // 2
        keys, values = memory[:layers], memory[layers:]
        shape, heads, flags, relu = MapShape.of(x), ctx.heads, ctx.flags, ctx.relu
        training, end_training = ctx.training
        tiles, rows = shape.tiles, shape.batch * shape.pixels
        grad = torch.zeros_like(x) if received[0] is None else like_map(received[0], x)

        output = torch.empty_like(x)
        sums = partial_sums(x, shape, 2)
        for group in groups_of_layers(layers):
            add_values(grad, values, group, weights, table, mask, output, sums, heads, shape, relu)
        norm_sums = batch_norm.sums_of_splits(sums)

        results, products, fold = value_gradients(
            grad, values, weights, received[2 + layers :], own[2 + layers :], value_stack, mask, heads, shape,
            norm=(output, table, norm_sums), relu=relu, training=training,
        )  # fmt: skip
        grad_keys, grad_pooled, grad_query, grad_key = score_gradients(
            products, weights, received, own, query, keys, pooled, query_weight, key_weight, heads, fold, shape,
            tiles.segments, key_stack,
        )  # fmt: skip
        grad_values, grad_value = results[:-1], results[-1]

        grad_x = torch.empty_like(x)
        parameter_products = partial_sums(x, shape, 12, grouped=True)
        switches = {
            "NEXT": False, "IS_SHORTCUT": False, "DECAY": False, "MASKED": mask is not None, "TRAINING": training,
            **flags,
        }  # fmt: skip
        run_kernel(
            gradient_kernel, shape.programs,
            grad, output, grad_value, x, either(shortcut, x), x, value_weight, sums, sums, either(mask, sums), table,
            either(end_table, table), either(source_table, table), norm_sums, grad_x, grad_x, sums, parameter_products,
            shape.height, shape.width, shape.channels, heads, shape.batch, tiles.samples, tiles.segments, tiles.rows,
            float(rows),
            DIRECT=True, GATED=False, PREVIOUS=False, maxnreg=REGISTERS, **ctx.end_flags, **switches,
            **shape.constants,
        )  # fmt: skip
        has_end = flags["END"]
        kinds = 12 if has_end else 10
        grads = torch.empty((kinds, shape.channels), device=x.device, dtype=shape.acc)
        run_kernel(
            weights_kernel, (kinds, pieces(shape.channels, SUM_CHANNELS)),
            parameter_products, either(active, products), grad_pooled, either(end_table, table), grads,
            shape.channels, len(parameter_products), shape.batch * tiles.segments, tiles.segments,
            GATED=True, SPLITS=SPLITS, CHANNELS=SUM_CHANNELS, ACC=TYPES[shape.acc],
        )  # fmt: skip
        partial, grad_x = grad_x, torch.empty_like(x)
        grad_shortcut = None if shortcut is None else torch.empty_like(x)
        run_kernel(
            finish_kernel, shape.finish_programs,
            partial, x, grad, output, grad, sums, either(mask, sums), table, norm_sums, either(end_table, table), grads,
            grad_pooled, grad_x, either(grad_shortcut, grad_x),
            shape.pixels, FINISH_PIXELS, pieces(shape.pixels, FINISH_PIXELS), shape.channels, float(rows),
            GATED=True, END_TRAINING=end_training, STAGES=FINISH_STAGES, **switches, **shape.pixel_constants,
        )  # fmt: skip
        grad_weight = grads[:9].view(value_weight.shape).to(value_weight.dtype)
        others = (None,) * (len(BatchNormArguments._fields) - 2)
        norms = (norm_sums[1].to(norm_weight.dtype), norm_sums[0].to(norm_weight.dtype), *others)
        if has_end:
            norms += (grads[11].to(end_weight.dtype), grads[10].to(end_weight.dtype), *others)
        return (
            grad_x, grad_query, grad_key, grad_weight, None, grad_shortcut, None, None, None, None, None, None,
            *grad_keys, *grad_values, *norms,
        )  # fmt: skip


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


class NothingSaved:
    """The context of a forward pass without a backward pass."""

    needs_input_grad = (False,)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


class Context(NothingSaved):
    """The context of a pass that a registered operator runs."""

    def __init__(self, differentiated: bool, saved: tuple[Tensor | None, ...] = (), **attributes: Any) -> None:
        self.needs_input_grad = (differentiated,)
        self.saved_tensors = saved
        vars(self).update(attributes)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


Memory = tuple[Tensor, ...] | Linked


def run_at_once(
    function: Any, arguments: tuple[Any, ...], earlier: int
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Runs the function of a layer and returns x', p, and the keys and values of all layers."""
    if torch.is_grad_enabled():
        references_of_own(arguments[0].device)
        outputs = function.apply(*arguments)
    else:
        outputs = function.forward(NothingSaved(), *arguments)  # autograd takes longer than a small kernel
    x, weights, *memory = outputs
    return x, weights, tuple(memory[: earlier + 1]), tuple(memory[earlier + 1 :])


def run_in_operator(
    function: Any, context: Context, arguments: tuple[Any, ...], earlier: int
) -> tuple[Tensor | None, ...]:
    """Runs the forward pass of a function in an operator, which may not return the earlier keys and values.

    Returns:
        x', p, the links of the keys and values so far (see `linked.py`), k and V.
    """
    result, weights, *memory = function.forward(context, *arguments)
    key, value = memory[earlier], memory[-1]
    return result, weights, *_links(key, value, earlier + 1, any(context.needs_input_grad)), key, value


def fake_results(x: Tensor, value: Tensor, earlier: int, heads: int, differentiated: bool) -> tuple[Tensor | None, ...]:
    """Returns tensors like those of `run_in_operator`, without values, given one like V."""
    (batch, channels), acc = value.shape[:2], accumulator(x)
    key = x.new_empty((batch, channels), dtype=acc)
    weights = x.new_empty((batch, heads, earlier + 1), dtype=acc)
    return torch.empty_like(x), weights, *_links(key, value, earlier + 1, differentiated), key, value


def _links(key: Tensor, value: Tensor, layers: int, differentiated: bool) -> tuple[Tensor | None, Tensor | None]:
    """Returns the links of the keys and values so far, or None if there is no backward pass."""
    return (new_link(key, layers), new_link(value, layers)) if differentiated else (None, None)


def differentiate_in_operator(
    function: Any, context: Any, keys: Sequence[Tensor], values: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[tuple[Any, ...], Tensor | None, Tensor | None]:
    """Runs the backward pass of a function in an operator.

    Args:
        function: The function of the layer.
        context: Its context.
        keys: The keys of the earlier layers.
        values: The values of the earlier layers.
        grads: The gradients of x', p and the links.

    Returns:
        What the function returns, and the gradients of the links of the keys and values.
    """
    earlier = len(keys)
    context.stacks = key_stack, value_stack = (new_stack(keys), new_stack(values)) if earlier else (None, None)
    grad, grad_weights, *stacks = grads
    memory = chain.from_iterable((None,) * (earlier + 1) if stack is None else stack.unbind() for stack in stacks)
    with torch.no_grad():
        return function.backward(context, grad, grad_weights, *memory), key_stack, value_stack


def _forward(
    x: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    mask: Tensor | None,
    shortcut: Tensor | None,
    source: Tensor | None,
    source_table: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    end_weight: Tensor | None,
    end_bias: Tensor | None,
    end_running_mean: Tensor | None,
    end_running_var: Tensor | None,
    key_link: Tensor | None,
    value_link: Tensor | None,
    keys: list[Tensor],
    values: list[Tensor],
    heads: int,
    relu: bool,
    end_relu: bool,
    training: bool,
    momentum: float,
    eps: float,
    end_training: bool,
    end_momentum: float,
    end_eps: float,
    differentiated: bool,
) -> tuple[Tensor | None, ...]:
    """Returns x', p and the links of the keys and values so far; k, V, q, sums of x, sums where x > 0, and both tables.

    See `linked.py` for the links.
    """
    norms: tuple[Any, ...] = (norm_weight, norm_bias, running_mean, running_var, training, momentum, eps)
    if end_weight is not None:
        norms += (end_weight, end_bias, end_running_mean, end_running_var, end_training, end_momentum, end_eps)
    context = Context(differentiated)
    arguments = (
        x, query_weight, key_weight, value_weight, mask, shortcut, source, source_table,
        heads, relu, end_relu, len(keys), *keys, *values, *norms,
    )  # fmt: skip
    results = run_in_operator(_BaseLayer, context, arguments, len(keys))
    query, pooled, active, table, end_table = context.saved_tensors[8:13]
    return (
        *results,
        query if differentiated else None, pooled if differentiated else None, active,
        table if differentiated or training else None, end_table if differentiated or end_training else None,
    )  # fmt: skip


def _fake(x: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    """Returns tensors like those of `_forward`, without values."""
    end_weight = args[11]
    keys, heads, training, end_training, differentiated = args[17], args[19], args[22], args[25], args[28]
    batch, channels, _, width = x.shape
    acc, sums = accumulator(x), bound_of_sums(batch, channels, width)

    def table(training: bool) -> Tensor | None:
        return x.new_empty((5 if training else 4, channels), dtype=acc) if differentiated or training else None

    return (
        *fake_results(x, torch.empty_like(x), len(keys), heads, differentiated),
        x.new_empty((batch, channels), dtype=acc) if differentiated else None,
        kept_sums(x, sums) if differentiated else None,
        kept_sums(x, sums, 2) if differentiated and end_weight is not None else None,
        table(training),
        table(end_training) if end_weight is not None else None,
    )


def _backward(
    arguments: tuple[Any, ...], results: tuple[Tensor | None, ...], grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the tensors among the arguments of `_forward`."""
    (
        x, query_weight, key_weight, value_weight, mask, shortcut, source, source_table,
        norm_weight, _, _, _, end_weight, _, _, _, _, _, keys, values, heads, relu, end_relu, training, _, _,
        end_training, _, _,
    ) = arguments  # fmt: skip
    _, weights, _, _, key, value, query, pooled, active, table, end_table = results
    saved = (
        x, query_weight, key_weight, value_weight, mask, shortcut, source_table, weights, query, pooled, active, table,
        end_table, norm_weight, end_weight, *keys, key, *values, value,
    )  # fmt: skip
    has_end = end_weight is not None
    flags = {"END": has_end, "SHORTCUT": shortcut is not None}
    end_flags = {"PROJECTED": source is not None, "RELU": end_relu}
    training = training, has_end and end_training
    context = Context(True, saved, heads=heads, relu=relu, flags=flags, end_flags=end_flags, training=training)
    found, key_stack, value_stack = differentiate_in_operator(_BaseLayer, context, keys, values, grads)
    norms = found[12 + 2 * len(keys) :]
    size = len(BatchNormArguments._fields)
    end_grads = norms[size : size + 4] if has_end else (None,) * 4
    return *found[:8], *norms[:4], *end_grads, key_stack, value_stack


_layer = DifferentiableOperator(
    "base_layer",
    _forward,
    _backward,
    _fake,
    outputs=4,
    results=11,
    keep=lambda args, results: (None, results[1], None, None, *results[4:]),  # all but x' and the links
    constant=("mask", "source", "source_table", *STATISTICS),
    unread={"shortcut": "source", **dict.fromkeys(STATISTICS)},
    links={"key_link": "keys", "value_link": "values"},
)


def examined(tensors: Sequence[Tensor] | Linked) -> Sequence[Tensor]:
    """Returns the tensors whose properties are examined. Linked ones are like the last of them."""
    return tensors.tensors[-1:] if isinstance(tensors, Linked) else tensors


def unsupported_reason(
    x: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    keys: Sequence[Tensor] | Linked,
    values: Sequence[Tensor] | Linked,
    norm: BatchNormArguments,
    mask: Tensor | None = None,
    *,
    heads: int,
    relu: bool = False,
    end: BlockEnd | None = None,
) -> str | None:
    keys, values = examined(keys), examined(values)
    if is_traced_otherwise(x, *keys, *values):
        return TRACED
    reason = light_unsupported_reason(
        x, query_weight, key_weight, value_weight, None, None, norm, mask, heads=heads, end=end
    )
    if reason is not None:
        return reason
    if any(v.shape != x.shape or v.dtype != x.dtype for v in values):
        return "the values must have the shape and dtype of the map"
    if not all(map(is_channels_last, values)):
        return "the values must be channels_last"
    if len(keys) != len(values):
        return f"there must be as many keys as values, got {len(keys)} and {len(values)}"
    if any(k.shape != x.shape[:2] or not k.is_contiguous() for k in keys):
        return "the keys must be contiguous, with one number for each sample and channel"
    return None


def base_layer(
    x: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    keys: Sequence[Tensor] | Linked,
    values: Sequence[Tensor] | Linked,
    norm: BatchNormArguments,
    mask: Tensor | None = None,
    *,
    heads: int,
    relu: bool = False,
    end: BlockEnd | None = None,
) -> tuple[Tensor, Tensor, Memory, Memory]:
    source, source_table = (None, None) if end is None or end.source is None else end.source
    maps = (
        x, query_weight, key_weight, value_weight, mask, None if end is None else end.shortcut, source, source_table
    )  # fmt: skip
    options = heads, relu, end is not None and end.relu
    if torch.compiler.is_compiling():
        return _compiled(maps, keys, values, norm, NO_NORM if end is None else end.norm, options)
    keys, values = tensors_of(keys), tensors_of(values)
    norms = (*norm, *end.norm) if end is not None else (*norm,)
    return run_at_once(_BaseLayer, (*maps, *options, len(keys), *keys, *values, *norms), len(keys))


def _compiled(
    maps: tuple[Any, ...],
    keys: Sequence[Tensor] | Linked,
    values: Sequence[Tensor] | Linked,
    norm: BatchNormArguments,
    end_norm: BatchNormArguments,
    options: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Linked, Linked]:
    """Calls the registered operator, which may not return the earlier keys and values."""
    keys, values = linked(keys), linked(values)
    result, weights, key_link, value_link, key, value, _, _, _, table, end_table = _layer.traced(
        *maps, *batch_norm.operator_tensors(norm), *batch_norm.operator_tensors(end_norm), keys.link, values.link,
        list(keys.tensors), list(values.tensors), *options, *norm[4:], *end_norm[4:],
    )  # fmt: skip
    batch_norm.update_statistics(norm, table, maps[0])
    batch_norm.update_statistics(end_norm, end_table, maps[0])
    return result, weights, keys.extended(key, key_link), values.extended(value, value_link)
