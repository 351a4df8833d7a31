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
    gradient     dx without dy, -0 where x = 0; dO'; dgate and the gradients of the    reads g, O, dO, z, s, O';
                 3x3 weight, of lambda and of the norms                                writes dx, dO'
    scores       gradients of the scores, y, and the weights of q and k
    weights      sums over programs
    finish       adds dy; dz and ds                                                    reads dx, z; writes dz, ds

x is computed again from z and s instead of being saved, and V is never stored. The sign of a gradient of zero tells
finish where the ReLU stopped it, without s. In the published reading O' is the shortcut s, so that finish reads g and O
again for ds instead of gradient writing dO'. Without an end, x is read instead of z and s. A norm that uses its running
statistics has no moments; if it is that of O, attention writes x' itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..choice import AUTO, current
from ..dispatch import TRACED
from ..residual_end import BatchNormArguments
from . import batch_norm
from .batch_norm import SPLITS, SUM_CHANNELS, accumulator
from .light_layer_forward import attention_kernel, end_kernel, gate_kernel, sum_kernel
from .light_layer_gradients import (
    finish_kernel,
    gradient_kernel,
    pooled_kernel,
    scores_kernel,
    weights_kernel,
)
from .map_shape import (
    FINISH_PIXELS,
    FINISH_STAGES,
    MOST_SEGMENTS,
    SMALL_BATCH,
    MapShape,
    bound_of_sums,
    either,
    head_blocks,
    kept_sums,
    like_map,
    partial_sums,
)
from .runtime import (
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
    shape: MapShape,
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
    table = end_table = tables = None
    if end is not None and not norm.training and not end.training:
        running = *end.tensors, *norm.tensors
        tables = torch.empty((2, 4, shape.channels), device=x.device, dtype=shape.acc)
        end_table, table = tables
    else:
        table = None if norm.training else batch_norm.running_table(norm, shape.acc)
        if end is not None and end.training:
            end_table = batch_norm.batch_table(batch_norm.moments_of(x), end, shape.batch * shape.pixels)
        elif end is not None:
            end_table = batch_norm.running_table(end, shape.acc)
        tables = end_table
    sums = kept_sums(x, shape.most_sums)
    active = kept_sums(x, shape.most_sums, 2) if end is not None and differentiated else None
    if pooled or end is not None:
        run_kernel(
            end_kernel, shape.end_programs,
            x, either(shortcut, x), either(tables, sums), stored, sums, either(active, sums), *(running or (sums,) * 8),
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
    shape = MapShape.of(x)
    rows, tiles = shape.batch * shape.pixels, shape.tiles
    stored, pooled, active, table, end_table = run_end(
        x, shortcut, norm, end, relu, shape, pooled=query_weight is not None, differentiated=differentiated
    )
    gate, depth = None, 0
    if query_weight is not None and key_weight is not None:
        gate = torch.empty((shape.batch, heads), device=x.device, dtype=shape.acc)
        depth = 0 if training else _depth_inside_tile(shape, heads)
        if not depth:
            compute_gates(pooled, query_weight, key_weight, gate, shape, tiles.segments)
    output = torch.empty_like(x)
    result = torch.empty_like(x) if not training else output
    moments = partial_sums(x, shape, 3, grouped=True) if training else pooled
    run_kernel(
        attention_kernel, shape.programs,
        stored, either(previous, x), value_weight, either(decay, pooled), either(gate, pooled), either(mask, pooled),
        either(table, pooled), output, moments, result, pooled, either(query_weight, pooled), either(key_weight,
        pooled),
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
            sum_kernel, shape.all_pixels,
            stored, output, table, either(mask, pooled), result, rows, shape.pixels, shape.channels,
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
    acc, sums = accumulator(x), bound_of_sums(batch, channels, width)

    def table(training: bool, running: Tensor | None) -> Tensor | None:
        rows = 5 if training and running is None else 4
        return x.new_empty((rows, channels), dtype=acc) if differentiated or training else None

    return (
        torch.empty_like(x),
        torch.empty_like(x),
        None if query_weight is None else x.new_empty((batch, heads), dtype=acc),
        kept_sums(x, sums) if differentiated else None,
        kept_sums(x, sums, 2) if differentiated and end_weight is not None else None,
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
    shape = MapShape.of(x)
    tiles, rows = shape.tiles, shape.batch * shape.pixels
    grad = torch.zeros_like(x) if grad is None else like_map(grad, x)
    grad_next = None if grad_next is None else like_map(grad_next, x)

    norm_sums = batch_norm.gradient_sums(grad, output, table, mask)
    grad_x = torch.empty_like(x)
    separate = previous is not None and not is_shortcut
    grad_previous = torch.empty_like(x) if separate else None
    products = partial_sums(x, shape, 12, grouped=True)
    grad_gates = partial_sums(x, shape)
    switches = {
        "NEXT": grad_next is not None, "GATED": gate is not None, "IS_SHORTCUT": is_shortcut,
        "DECAY": decay is not None, "MASKED": mask is not None, "TRAINING": training, "END": has_end,
        "SHORTCUT": shortcut is not None,
    }  # fmt: skip
    run_kernel(
        gradient_kernel, shape.programs,
        grad, output, either(grad_next, grad), x, either(shortcut, x), either(previous, x), value_weight, either(gate,
        table),
        either(decay, table), either(mask, table), table, either(end_table, table), either(source_table, table),
        norm_sums,
        grad_x, either(grad_previous, grad_x), grad_gates, products,
        shape.height, shape.width, shape.channels, heads, shape.batch, tiles.samples, tiles.segments, tiles.rows,
        float(rows),
        PREVIOUS=previous is not None, PROJECTED=projected, RELU=relu, DIRECT=False, **switches, **shape.constants,
    )  # fmt: skip
    grad_pooled, grad_query, grad_key = pooled, None, None
    if gate is not None:
        grad_pooled, grad_weights = gate_gradients(
            grad_gates, pooled, query_weight, key_weight, gate, grad_gate, heads, shape, tiles.segments
        )
        grad_query, grad_key = grad_weights.sum(0)
        grad_query = grad_query.to(query_weight.dtype).reshape(query_weight.shape)
        grad_key = grad_key.to(key_weight.dtype).reshape(key_weight.shape)
    kinds = 12 if has_end else 10
    sums_of_weights = torch.empty((kinds, shape.channels), device=x.device, dtype=shape.acc)
    run_kernel(
        weights_kernel, (kinds, pieces(shape.channels, SUM_CHANNELS)),
        products, either(active, products), grad_pooled, either(end_table, table), sums_of_weights,
        shape.channels, len(products), shape.batch * tiles.segments, tiles.segments,
        GATED=gate is not None, SPLITS=SPLITS, CHANNELS=SUM_CHANNELS, ACC=TYPES[shape.acc],
    )  # fmt: skip
    grad_shortcut = None if shortcut is None else torch.empty_like(x)
    if has_end or gate is not None:
        partial = grad_x
        grad_x = torch.empty_like(x)
        run_kernel(
            finish_kernel, shape.finish_programs,
            partial, x, grad, output, either(grad_next, grad), either(decay, table), either(mask, table), table,
            norm_sums, either(end_table, table), sums_of_weights, grad_pooled, grad_x, either(grad_shortcut, grad_x),
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


def _depth_inside_tile(shape: MapShape, heads: int) -> int:
    """Returns the channels of a head if the kernel that reads the gates computes them, else 0.

    That saves a launch, which a small batch takes longer for than for the gates, but every program computes them anew,
    from the sums of all segments, of which tall maps have too many.
    """
    depth = shape.channels // heads
    fits = depth == power_of_2(depth) and depth <= shape.tiles.channels and shape.tiles.segments <= MOST_SEGMENTS
    return depth if fits and shape.tiles.samples == 1 and shape.batch <= SMALL_BATCH else 0


def compute_gates(
    pooled: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    gate: Tensor,
    shape: MapShape,
    segments: int,
    total: Tensor | None = None,
) -> None:
    """Computes the gates, [B, heads], given the sums of x, [B * segments, C], and their totals, [B, C], if wanted."""
    heads = gate.shape[1]
    blocks, constants = head_blocks(shape.channels, heads, shape.acc)
    run_kernel(
        gate_kernel, (shape.batch, blocks),
        pooled, query_weight, key_weight, gate, either(total, pooled), shape.channels, segments, query_weight.shape[-1],
        shape.pixels, heads, (shape.channels // heads) ** -0.5, TOTAL=total is not None, **constants,
    )  # fmt: skip


def gate_gradients(
    partial: Tensor,
    pooled: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    gate: Tensor,
    grad_gate: Tensor | None,
    heads: int,
    shape: MapShape,
    segments: int,
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of each pixel of x through the average, [B, C], and those of the weights of q and k.

    The latter are partial sums, [splits, 2, k]. The sums of x, `pooled`, are [B * segments, C].
    """
    size, batch, channels = query_weight.shape[-1], shape.batch, shape.channels
    blocks, constants = head_blocks(channels, heads, shape.acc)
    average, grad_pooled = torch.empty((2, batch, channels), device=gate.device, dtype=shape.acc).unbind()
    grad_projections = torch.empty((batch, 2, channels), device=gate.device, dtype=shape.acc)
    run_kernel(
        scores_kernel, (batch, blocks),
        partial, gate, gate if grad_gate is None else grad_gate.contiguous(), pooled, query_weight, key_weight, average,
        grad_projections, channels, shape.tiles.segments, segments, size, shape.pixels, heads,
        (channels // heads) ** -0.5, RETURNED=grad_gate is not None, **constants,
    )  # fmt: skip
    block = min(256, max(16, power_of_2(channels)))
    chunks = pieces(channels, block)
    grad_weights = torch.empty((batch * chunks, 2, size), device=gate.device, dtype=shape.acc)
    run_kernel(
        pooled_kernel, (batch, chunks),
        average, grad_projections, query_weight, key_weight, grad_pooled, grad_weights, channels, size, shape.pixels,
        STEPS=min(8, power_of_2(size)), CHANNELS=block, ACC=TYPES[shape.acc],
    )  # fmt: skip
    return grad_pooled, grad_weights


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
    reason = attention_unsupported_reason(query_weight, key_weight, value_weight, shape[1], heads)
    if reason is not None:
        return reason
    training = norm.training or (end is not None and end.norm.training)
    if training and size // shape[1] < 2:
        return "a channel with a single value has no variance"
    if not all(t is None or t.is_contiguous() for t in tensors):
        return "the parameters, statistics and masks must be contiguous"
    return device_unsupported_reason(x)


def attention_unsupported_reason(
    query_weight: Tensor | None, key_weight: Tensor | None, value_weight: Tensor, channels: int, heads: int
) -> str | None:
    """Returns which limit of all kernels of layer attention the weights exceed, or None."""
    if value_weight.shape[1:] != (1, 3, 3):
        return f"the convolution of the values must be 3x3, got {tuple(value_weight.shape[1:])}"
    if (query_weight is None) != (key_weight is None):
        return "there must be both q and k, or neither"
    if query_weight is not None and not query_weight.shape[-1] % 2:
        return f"the convolutions of q and k must have an odd size, got {query_weight.shape[-1]}"
    if channels % heads:
        return f"the channels must be divisible by the number of heads, got {channels} and {heads}"
    return None


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
