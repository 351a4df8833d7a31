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
gradients G_s pass through the backward passes of all layers, and each of them adds its part in place. The kernel of the
attention reads the values of the `NEAR` latest layers; attended adds up those before them.

For torch.compile both passes of a layer are registered as operators (`base_layer_operator.py`). The gradients G_s then
pass through links (see `linked.py`), and each layer writes new ones, one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..dispatch import TRACED
from ..linked import Linked, linked, tensors_of
from ..once import once_differentiable
from ..residual_end import BatchNormArguments
from . import batch_norm
from .base_layer_operator import (
    Context,
    Memory,
    differentiate_in_operator,
    examined,
    fake_results,
    run_at_once,
    run_in_operator,
)
from .base_layer_values import (
    add_values,
    compute_scores,
    groups_of_layers,
    padded,
    score_gradients,
    size_of_tuple,
    value_gradients,
)
from .batch_norm import SPLITS, SUM_CHANNELS, accumulator
from .light_layer import NO_NORM, STATISTICS, run_end
from .light_layer import unsupported_reason as light_unsupported_reason
from .light_layer_forward import attention_kernel, sum_kernel
from .light_layer_gradients import finish_kernel, gradient_kernel, weights_kernel
from .map_shape import (
    FINISH_PIXELS,
    FINISH_STAGES,
    MapShape,
    bound_of_sums,
    either,
    kept_sums,
    like_map,
    partial_sums,
)
from .own_gradients import may_overwrite
from .runtime import (
    TYPES,
    DifferentiableOperator,
    is_channels_last,
    is_traced_otherwise,
    pieces,
    run_kernel,
)

if TYPE_CHECKING:
    from ..light_layer import BlockEnd

NEAR = 8  # earlier layers whose values the kernel of the attention reads, a power of two
REGISTERS = 168  # of a thread: three programs of four warps fit a multiprocessor


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
