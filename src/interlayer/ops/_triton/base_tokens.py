"""Fused kernels of a layer with MRLA-base in a transformer: the norm, the attention over the layers and the sum.

The kernels of MRLA-light in transformers (`light_tokens.py`) and of MRLA-base in CNNs (`base_layer.py`) do what they
have in common. The forward pass of layer t runs

    statistics   mean and 1 / std of each token, sums of n by sample                   reads x; writes n^
    scores       y, q, k_t and the attention weights p
    attention    V_t, O = sum of p_s V_s, x' = x + m O; the prefix tokens              reads x, V_s; writes V_t, x'

and the backward pass, for the gradients g of x' and G_s of V_s from later layers, with dO = m g,

    values       G'_s = G_s + p_s dO, and the sums of dO V_s                           reads g, V_s, G_s; writes G'_s
    keys         the gradients of q and of all keys
    projections  the gradients of y and of the weights of q and k
    convolution  dn without dy, the transposed convolution of G'_t; gradient of the    reads n^, G'_t; writes dn
                 3x3 weight
    norms        dx, and the gradients of the weights of the norm                      reads n^, g, dn; writes dx
    sums         sums over programs

The only tensors of the size of the tokens that are saved are V_t, which later layers read as well, and n^, which is n
without the weight and bias of the norm and, under autocast, takes half the memory of x. The gradients
G_s pass through the backward passes of all layers, as in `base_layer.py`, which also describes the operators that are
registered for torch.compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..autocast import autocast_type
from ..dispatch import TRACED
from ..linked import Linked, linked, tensors_of
from ..once import once_differentiable
from .base_layer_gradients import VARYING
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
from .batch_norm import accumulator
from .light_layer_parts import append, load_gate, program_and_channels, three_weights
from .light_tokens import (
    DTYPES,
    Sizes,
    empty_map,
    input_gradients,
    token_statistics,
    tokens_unsupported_reason,
)
from .light_tokens_kernels import add_row, known_pixel, load_row, store_prefix, zeros_of_row
from .map_shape import either
from .own_gradients import may_overwrite
from .runtime import DifferentiableOperator, is_channels_last, is_traced_otherwise, run_kernel

if TYPE_CHECKING:
    from ..light_tokens import LayerNormArguments

NEAR = 16  # earlier layers whose values the attention kernel reads


@triton.jit(do_not_specialize=VARYING)
def attention_kernel(
    x_ptr,  # [batch, tokens, channels]
    far_ptr,  # [batch, height * width, channels]: the sum of p_s V_s of the layers before the given ones
    values,  # V_s of earlier layers, each [batch, height * width, channels]
    statistics_ptr,  # [batch, 4, tokens]
    weight_ptr,  # [channels, 9]
    gamma_ptr,  # [channels]
    beta_ptr,  # [channels]
    weights_ptr,  # [batch, heads, layers]: p
    mask_ptr,  # [batch]
    value_ptr,  # [batch, height * width, channels]: V_t
    sum_ptr,  # [batch, tokens, channels]: x'
    prefix,
    height,
    width,
    channels,
    heads,
    segments,
    rows,
    number,  # of the given values
    first_layer,
    layers,
    FAR: tl.constexpr,
    LAYERS: tl.constexpr,
    MASKED: tl.constexpr,
    ADD_PREFIX: tl.constexpr,
    WHOLE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    program, columns = program_and_channels(channels, CHANNELS)
    inside = columns < channels
    sample = (program // segments).to(tl.int64)
    first = (program % segments) * rows
    last = tl.minimum(first + rows, height)
    pixels = height * width
    tokens = prefix + pixels
    start = (sample * pixels - prefix) * channels  # of maps, so that a token has the same offset there
    x_ptr += sample * tokens * channels
    sum_ptr += sample * tokens * channels
    statistics_ptr += sample * 4 * tokens
    w00, w01, w02 = three_weights(weight_ptr, 0, columns, inside, ACC)
    w10, w11, w12 = three_weights(weight_ptr, 3, columns, inside, ACC)
    w20, w21, w22 = three_weights(weight_ptr, 6, columns, inside, ACC)
    gamma = tl.load(gamma_ptr + columns, mask=inside, other=0.0).to(ACC)
    beta = tl.load(beta_ptr + columns, mask=inside, other=0.0).to(ACC)
    own = load_gate(weights_ptr, sample, columns, inside, channels, heads, layers, layers - 1, ACC)
    weights = ()
    for layer in tl.static_range(LAYERS):
        given = inside & (columns * 0 + layer < number)
        weight = load_gate(weights_ptr, sample, columns, given, channels, heads, layers, first_layer + layer, ACC)
        weights = append(weights, weight)
    factor = 1.0
    if MASKED:
        factor = tl.load(mask_ptr + sample).to(ACC)
    if first == 0:
        store_prefix(
            x_ptr, statistics_ptr, sum_ptr, columns, inside, gamma, beta, factor, prefix, tokens, channels, ADD_PREFIX,
            ACC,
        )  # fmt: skip
    for left in range(0, width, COLUMNS):
        above = zeros_of_row(COLUMNS, CHANNELS, ACC)  # V_t of the row above, without the row below it
        here = zeros_of_row(COLUMNS, CHANNELS, ACC)  # V_t of this row, without the rows below
        for row in range(tl.maximum(first - 1, 0), last + 1):
            normed = load_row(
                x_ptr, statistics_ptr, row, left, columns, inside, gamma, beta, prefix, height, width, channels,
                WHOLE, COLUMNS, CHANNELS, ACC,
            )  # fmt: skip
            above = add_row(above, normed, w20, w21, w22, COLUMNS)
            if row > first:  # the row above is complete
                outputs = ()
                begin = (prefix + (row - 1) * width + left) * channels + columns
                for index in tl.static_range(COLUMNS):
                    known = known_pixel(columns, inside, left + index, width, WHOLE)
                    place = begin + index * channels
                    tl.store(value_ptr + start + place, above[index].to(value_ptr.dtype.element_ty), mask=known)
                    output = own * above[index]
                    if FAR:
                        output += tl.load(far_ptr + start + place, mask=known, other=0.0).to(ACC)
                    outputs = append(outputs, output)
                for layer in tl.static_range(LAYERS):
                    given = inside & (columns * 0 + layer < number)
                    added = ()
                    for index in tl.static_range(COLUMNS):
                        known = given
                        if not WHOLE:
                            known = given & (columns * 0 + left + index < width)
                        place = begin + index * channels
                        value = tl.load(values[layer] + start + place, mask=known, other=0.0).to(ACC)
                        added = append(added, outputs[index] + weights[layer] * value)
                    outputs = added
                for index in tl.static_range(COLUMNS):
                    known = known_pixel(columns, inside, left + index, width, WHOLE)
                    place = begin + index * channels
                    x = tl.load(x_ptr + place, mask=known, other=0.0).to(ACC)
                    tl.store(sum_ptr + place, (x + factor * outputs[index]).to(sum_ptr.dtype.element_ty), mask=known)
            above = add_row(here, normed, w10, w11, w12, COLUMNS)
            here = add_row(zeros_of_row(COLUMNS, CHANNELS, ACC), normed, w00, w01, w02, COLUMNS)


class _BaseTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        value_weight: Tensor,
        gamma: Tensor,
        beta: Tensor,
        mask: Tensor | None,
        eps: float,
        heads: int,
        height: int,
        width: int,
        add_prefix: bool,
        dtype: int,  # of the values, an index of DTYPES
        earlier: int,
        *memory: Tensor,  # keys and values of the earlier layers
    ) -> tuple[Tensor, ...]:
        keys, values = memory[:earlier], memory[earlier:]
        sizes, layers = Sizes.of(x, None, height, width), earlier + 1
        shape, tiles = sizes.shape, sizes.shape.tiles
        kept = DTYPES[dtype] if any(ctx.needs_input_grad) else None
        statistics, pooled, normed = token_statistics(x, None, gamma, beta, eps, 0.0, sizes, kept)
        query, key, weights = compute_scores(pooled, query_weight, key_weight, keys, heads, shape, sizes.segments[0])
        value = empty_map(x, height, width, dtype)
        result = torch.empty_like(x)
        first = max(0, earlier - NEAR)
        far = torch.empty_like(value) if first else None
        for group in groups_of_layers(first):
            add_values(None, values, group, weights, None, None, far, None, heads, shape, False)
        bucket = size_of_tuple(earlier - first) if earlier else 0
        run_kernel(
            attention_kernel, sizes.row_programs,
            x, either(far, x), padded(values[first:], bucket) if earlier else None, statistics, value_weight, gamma,
            beta,
            weights, either(mask, weights), value, result,
            sizes.prefix, height, width, shape.channels, heads, tiles.segments, tiles.rows, earlier - first, first,
            layers,
            FAR=far is not None, LAYERS=bucket, MASKED=mask is not None, ADD_PREFIX=add_prefix,
            **sizes.short_row_constants,
        )  # fmt: skip
        ctx.save_for_backward(
            query_weight, key_weight, value_weight, gamma, beta, mask, weights, query, pooled, statistics, normed,
            *keys, key, *values, value,
        )  # fmt: skip
        ctx.numbers, ctx.dtype, ctx.device = (heads, height, width, add_prefix), x.dtype, x.device
        ctx.stacks = None
        ctx.set_materialize_grads(False)
        return result, weights, *keys, key, *values, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *received: Tensor | None) -> Any:
        own = may_overwrite(received, ctx.device) if ctx.stacks is None else [False] * len(received)
        key_stack, value_stack = ctx.stacks or (None, None)
        (
            query_weight, key_weight, value_weight, gamma, beta, mask, weights, query, pooled, statistics, normed,
            *memory,
        ) = ctx.saved_tensors  # fmt: skip
        heads, height, width, add_prefix = ctx.numbers
        layers = len(memory) // 2
        keys, values = memory[:layers], memory[layers:]
        grad = torch.zeros_like(normed, dtype=ctx.dtype) if received[0] is None else received[0].contiguous()
        sizes = Sizes.of(grad, None, height, width)
        shape = sizes.shape
        results, products, fold = value_gradients(
            grad, values, weights, received[2 + layers :], own[2 + layers :], value_stack, mask, heads, shape,
            norm=None, prefix=sizes.prefix,
        )  # fmt: skip
        grad_keys, grad_pooled, grad_query, grad_key = score_gradients(
            products, weights, received, own, query, keys, pooled, query_weight, key_weight, heads, fold, shape,
            len(pooled) // shape.batch, key_stack,
        )  # fmt: skip
        grad_x, _, grad_kernel, norms, _ = input_gradients(
            grad, None, results[-1], grad_pooled, None, normed, None, statistics, value_weight, gamma, beta, None, None,
            None, mask, add_prefix, sizes,
        )  # fmt: skip
        return (
            grad_x,
            grad_query,
            grad_key,
            grad_kernel.view(value_weight.shape).to(value_weight.dtype),
            norms[0].to(gamma.dtype),
            norms[1].to(beta.dtype),
            *(None,) * 8,
            *grad_keys,
            *results[:-1],
        )


def _forward(
    x: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None,
    key_link: Tensor | None,
    value_link: Tensor | None,
    keys: list[Tensor],
    values: list[Tensor],
    eps: float,
    heads: int,
    height: int,
    width: int,
    add_prefix: bool,
    dtype: int,
    differentiated: bool,
) -> tuple[Tensor | None, ...]:
    """Returns x', p and the links of the keys and values so far; k, V, q, the sum of n by sample, statistics and n^.

    See `linked.py` for the links.
    """
    context = Context(differentiated)
    arguments = (
        x, query_weight, key_weight, value_weight, gamma, beta, mask, eps, heads, height, width, add_prefix, dtype,
        len(keys), *keys, *values,
    )  # fmt: skip
    results = run_in_operator(_BaseTokens, context, arguments, len(keys))
    if not differentiated:
        return *results, None, None, None, None
    query, pooled, statistics, normed = context.saved_tensors[7:11]
    assert pooled is not None
    # The number of segments depends on the batch size, which may be a symbol to torch.compile.
    return *results, query, pooled.view(len(x), -1, x.shape[2]).sum(1), statistics, normed


def _fake(x: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    """Returns tensors like those of `_forward`, without values."""
    keys, heads, height, width, dtype, differentiated = args[8], *args[11:14], *args[15:]
    batch, tokens, channels = x.shape
    results = fake_results(x, empty_map(x, height, width, dtype), len(keys), heads, differentiated)
    if not differentiated:
        return *results, None, None, None, None
    shapes = (batch, channels), (batch, channels), (batch, 4, tokens)
    sums = (x.new_empty(shape, dtype=accumulator(x)) for shape in shapes)
    return *results, *sums, torch.empty_like(x, dtype=DTYPES[dtype])


def _backward(
    arguments: tuple[Any, ...], results: tuple[Tensor | None, ...], grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the tensors among the arguments of `_forward`. The first is that of x' instead of x."""
    grad, *tensors, _, _, keys, values, _, heads, height, width, add_prefix, _ = arguments
    _, weights, _, _, key, value, query, pooled, statistics, normed = results
    saved = (*tensors, weights, query, pooled, statistics, normed, *keys, key, *values, value)
    context = Context(True, saved, numbers=(heads, height, width, add_prefix), dtype=grad.dtype)
    found, *stacks = differentiate_in_operator(_BaseTokens, context, keys, values, (grad, *grads[1:]))
    return *found[:7], *stacks


_layer = DifferentiableOperator(
    "base_tokens",
    _forward,
    _backward,
    _fake,
    outputs=4,
    results=10,
    keep=lambda args, results: (None, results[1], None, None, *results[4:]),  # all but x' and the links
    constant=("mask",),
    unread={"x": 0},
    links={"key_link": "keys", "value_link": "values"},
)


def unsupported_reason(
    x: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    keys: Sequence[Tensor] | Linked,
    values: Sequence[Tensor] | Linked,
    norm: LayerNormArguments,
    mask: Tensor | None = None,
    *,
    heads: int,
    grid: tuple[int, int],
    prefix: int = 0,
    add_prefix: bool = False,
) -> str | None:
    parameters = [query_weight, key_weight, value_weight, mask, norm.weight, norm.bias]
    keys, values = examined(keys), examined(values)
    if is_traced_otherwise(x, *parameters, *keys, *values):
        return TRACED
    reason = tokens_unsupported_reason(x, query_weight, key_weight, value_weight, parameters, heads, grid, prefix)
    if reason is not None:
        return reason
    if len(keys) != len(values):
        return f"there must be as many keys as values, got {len(keys)} and {len(values)}"
    dtype = autocast_type(x) or x.dtype
    if any(v.shape != (x.shape[0], x.shape[2], *grid) or v.dtype != dtype for v in values):
        return f"the values must have the shape of the grid and the dtype {dtype}"
    if not all(map(is_channels_last, values)):
        return "the values must be channels_last"
    if any(k.shape != (x.shape[0], x.shape[2]) or not k.is_contiguous() for k in keys):
        return "the keys must be contiguous, with one number for each sample and channel"
    return None


def base_tokens(
    x: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    keys: Sequence[Tensor] | Linked,
    values: Sequence[Tensor] | Linked,
    norm: LayerNormArguments,
    mask: Tensor | None = None,
    *,
    heads: int,
    grid: tuple[int, int],
    prefix: int = 0,
    add_prefix: bool = False,
) -> tuple[Tensor, Tensor, Memory, Memory]:
    tensors = (x.contiguous(), query_weight, key_weight, value_weight, norm.weight, norm.bias, mask)
    numbers = (norm.eps, heads, *grid, add_prefix and prefix > 0, DTYPES.index(autocast_type(x) or x.dtype))
    if not torch.compiler.is_compiling():
        keys, values = tensors_of(keys), tensors_of(values)
        return run_at_once(_BaseTokens, (*tensors, *numbers, len(keys), *keys, *values), len(keys))
    keys, values = linked(keys), linked(values)
    result, weights, key_link, value_link, key, value, *_ = _layer.traced(
        *tensors, keys.link, values.link, list(keys.tensors), list(values.tensors), *numbers
    )
    return result, weights, keys.extended(key, key_link), values.extended(value, value_link)
