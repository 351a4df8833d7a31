"""Fused kernels of a layer with MRLA-light in a transformer: the norms, the attention over the grid and the sum.

Tokens [B, P + H W, C] are read where they lie, so that neither a map nor the patch tokens are copied. With n the
normalized patch tokens, the forward pass runs

    statistics   mean and 1 / std of each token of x and O', sums of n by sample         reads x, O'; writes n^
    gate         y, q, k and the gates
    attention    u = the 3x3 convolution of n, O = gate GELU(u) + lambda LayerNorm'(O'),   reads x, O'; writes O, x'
                 x' = x + m O; the prefix tokens

and the backward pass, for the gradients g of x' and dO of O from the next layer, with dO += m g,

    values       u again; du = gate dO GELU'(u), and sums of dO GELU(u) by sample         reads n^, g, dO; writes du
    scores       gradients of the scores, y, and the weights of q and k
    convolution  dn without dy, the transposed convolution of du; gradient of the weight   reads n^, du; writes dn
    norms        dx and dO' through both norms, and the gradients of lambda and of the     reads n^, g, dO, dn, O';
                 norms' weights                                                            writes dx, dO'
    sums         sums over programs

A thread of attention and values holds a row of pixels of a few channels, so that a token is loaded and normalized once
for all nine weights. O', the statistics and n^, which is n without the weight and bias of the norm, are saved; u and
GELU(u) are computed again. Under autocast, n^ takes half the memory of x. Everything is computed in float32 (float64
for float64); n^, O, its gradient, du and dn are stored in the dtype of O, x' and dx in that of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..autocast import autocast_type
from ..dispatch import TRACED
from .batch_norm import accumulator
from .light_layer import attention_unsupported_reason, compute_gates, gate_gradients
from .light_tokens_kernels import (
    attention_kernel,
    convolution_kernel,
    norms_kernel,
    statistics_kernel,
    sums_kernel,
    values_kernel,
)
from .map_shape import SMALL_BATCH, MapShape, either, map_shape, partial_sums
from .runtime import (
    INTERPRETED,
    TYPES,
    DifferentiableOperator,
    device_unsupported_reason,
    is_traced_otherwise,
    pieces,
    power_of_2,
    run_kernel,
)

if TYPE_CHECKING:
    from ..light_tokens import LayerNormArguments

ELEMENTS = 512  # of a tile of entire tokens
PER_WARP = 512  # elements of such a tile: a token in one warp is normalized without a barrier
TOKEN_STAGES = 3  # such tiles that are loaded ahead, one less of many channels
TILE_STAGES = 4  # rows of the grid that are loaded ahead
WIDEST_ROW = 16  # pixels that a thread holds; of wider grids, half as many
ROW_CHANNELS = 64  # of a program whose threads hold the pixels of a row
PER_ROW_WARP = 64  # of these channels
REGISTERS = 168  # of a thread at most, so that a multiprocessor runs twelve warps
MORE_REGISTERS = 192  # if a thread holds the weights of other layers
PROGRAMS = 4 if INTERPRETED else 2112  # as many as are wanted: 16 for each multiprocessor of an H200
GRADIENT_PROGRAMS = 4 if INTERPRETED else 1056  # in the backward pass, in which each of them stores sums
LOADED = 7  # pixels of a row that are loaded before any is stored
MOST_SEGMENTS = 16  # of the tokens of a sample, twice as many in small batches
ROW_SEGMENTS = 16  # of the rows of a sample, in small batches
SPLITS = 32 if INTERPRETED else 256  # partial sums that are added at once
MOST_CHANNELS = 4096  # entire tokens of n^, g, dO, dn and O' lie in shared memory while they are loaded
DTYPES = tuple(TYPES)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tokens, how they are divided among programs, and the constants of the kernels.

    Args:
        shape: Sizes of the map of the patch tokens, and how it is divided among the programs that convolve it.
        prefix: P, the number of prefix tokens.
        previous_tokens: The number of tokens of a sample in O'.
    """

    shape: MapShape
    prefix: int
    previous_tokens: int

    @classmethod
    def of(cls, x: Tensor, previous: Tensor | None, height: int, width: int) -> Sizes:
        return _sizes(*x.shape, previous is not None and previous.dim() == 3, height, width, accumulator(x))

    @cached_property
    def tokens(self) -> int:
        return self.prefix + self.shape.pixels

    @cached_property
    def constants(self) -> dict[str, Any]:
        """The constants of a kernel whose programs hold entire tokens."""
        channels = max(16, power_of_2(self.shape.channels))
        number = max(1, ELEMENTS // channels)
        warps = min(16, max(1, number * channels // PER_WARP))
        stages = TOKEN_STAGES - (channels > MOST_CHANNELS // 4)  # 100 KB of shared memory suffice up to there
        sizes = {"STAGES": stages, "TOKENS": number, "CHANNELS": channels}
        return {**sizes, "ACC": TYPES[self.shape.acc], "num_warps": warps}

    @cached_property
    def tile_constants(self) -> dict[str, Any]:
        """The constants of a kernel whose programs hold tiles of some pixels of a row."""
        return {**self.shape.constants, "STAGES": TILE_STAGES, "maxnreg": REGISTERS}

    @cached_property
    def row_constants(self) -> dict[str, Any]:
        """The constants of a kernel whose threads hold the pixels of a row."""
        return self._rows(WIDEST_ROW, REGISTERS)

    @cached_property
    def short_row_constants(self) -> dict[str, Any]:
        """The constants of such a kernel that needs registers for the values of other layers, too."""
        return self._rows(WIDEST_ROW // 2, MORE_REGISTERS)

    def _rows(self, widest: int, registers: int) -> dict[str, Any]:
        channels = min(ROW_CHANNELS, max(16, power_of_2(self.shape.channels)))
        width = self.shape.width
        columns = pieces(width, pieces(width, widest if width <= widest else WIDEST_ROW // 2))
        sizes = {"WHOLE": columns == width, "COLUMNS": columns, "CHANNELS": channels}
        options = {"num_warps": max(1, channels // PER_ROW_WARP), "maxnreg": registers}
        return {**sizes, "ACC": TYPES[self.shape.acc], **options}

    @cached_property
    def row_programs(self) -> tuple[int]:
        """The grid of such a kernel."""
        chunks = pieces(self.shape.channels, self.row_constants["CHANNELS"])
        return (self.shape.batch * self.shape.tiles.segments * chunks,)

    def depth_inside_tile(self, heads: int) -> int:
        """Returns the channels of a head if the kernel that reads the gates computes them, else 0."""
        depth = self.shape.channels // heads
        fits = depth == power_of_2(depth) and depth <= self.row_constants["CHANNELS"]
        return depth if fits and self.shape.batch <= SMALL_BATCH else 0

    @cached_property
    def segments(self) -> tuple[int, int]:
        """The number of segments of the tokens of a sample, and the tokens of a segment."""
        most = MOST_SEGMENTS * (2 if self.shape.batch <= SMALL_BATCH else 1)
        wanted = max(1, min(most, pieces(PROGRAMS, self.shape.batch)))
        size = self.constants["TOKENS"] * pieces(self.tokens, self.constants["TOKENS"] * wanted)
        return pieces(self.tokens, size), size

    @cached_property
    def gradient_programs(self) -> int:
        """The number of programs that the tokens of the batch are divided among in the backward pass."""
        return min(GRADIENT_PROGRAMS, pieces(self.shape.batch * self.tokens, self.constants["TOKENS"]))


@lru_cache(maxsize=1024)
def _sizes(
    batch: int, tokens: int, channels: int, previous_has_prefix: bool, height: int, width: int, acc: torch.dtype
) -> Sizes:
    pixels = height * width
    shape = map_shape(batch, channels, height, width, acc, ROW_SEGMENTS)
    return Sizes(shape, tokens - pixels, tokens if previous_has_prefix else pixels)


def token_statistics(
    x: Tensor,
    previous: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    eps: float,
    previous_eps: float,
    sizes: Sizes,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns mean and 1 / std of the tokens of x and O', [B, 4, P + H W], sums of n, [B * segments, C], and n^.

    n^, [B, P + H W, C], is computed for the backward pass if its dtype is given.
    """
    shape, tokens = sizes.shape, sizes.tokens
    segments, tokens_per_segment = sizes.segments
    statistics = torch.empty((shape.batch, 4, tokens), device=x.device, dtype=shape.acc)
    pooled = torch.empty((shape.batch * segments, shape.channels), device=x.device, dtype=shape.acc)
    normed = None if dtype is None else torch.empty_like(x, dtype=dtype)
    run_kernel(
        statistics_kernel, (shape.batch * segments,),
        x, either(previous, x), gamma, beta, statistics, pooled, either(normed, x), tokens, sizes.previous_tokens,
        sizes.prefix, tokens_per_segment, segments, shape.channels, eps, previous_eps, PREVIOUS=previous is not None,
        NORMED=normed is not None, **sizes.constants,
    )  # fmt: skip
    return statistics, pooled, normed


def _forward(
    x: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    value_weight: Tensor,
    previous: Tensor | None,
    decay: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    previous_gamma: Tensor | None,
    previous_beta: Tensor | None,
    mask: Tensor | None,
    heads: int,
    height: int,
    width: int,
    add_prefix: bool,
    eps: float,
    previous_eps: float,
    dtype: int,  # of O, an index of DTYPES
    differentiated: bool,
) -> tuple[Tensor | None, ...]:
    """Returns x', O and the gates, and for the backward pass the statistics of the tokens, the sums of n, and n^."""
    sizes = Sizes.of(x, previous, height, width)
    shape, tiles = sizes.shape, sizes.shape.tiles
    segments = sizes.segments[0]
    statistics, pooled, normed = token_statistics(
        x, previous, gamma, beta, eps, previous_eps, sizes, DTYPES[dtype] if differentiated else None
    )
    gate, total, depth = None, None, 0
    if query_weight is not None and key_weight is not None:
        gate = torch.empty((shape.batch, heads), device=x.device, dtype=shape.acc)
        total = _total(x) if differentiated else None
        depth = 0 if differentiated else sizes.depth_inside_tile(heads)
        if not depth:
            compute_gates(pooled, query_weight, key_weight, gate, shape, segments, total)
    output = empty_map(x, height, width, dtype)
    result = torch.empty_like(x)
    run_kernel(
        attention_kernel, sizes.row_programs,
        x, either(previous, x), statistics, value_weight, gamma, beta, either(previous_gamma, gamma),
        either(previous_beta, beta), either(decay, gamma), either(gate, pooled), either(mask, pooled), output, result,
        pooled, either(query_weight, pooled), either(key_weight, pooled),
        sizes.previous_tokens, sizes.prefix, height, width, shape.channels, heads, tiles.segments, tiles.rows, segments,
        1 if query_weight is None else query_weight.shape[-1], (shape.channels // heads) ** -0.5,
        GATED=gate is not None, DEPTH=depth, PREVIOUS=previous is not None, DECAY=decay is not None,
        MASKED=mask is not None, ADD_PREFIX=add_prefix, LOADED=LOADED, **sizes.row_constants,
    )  # fmt: skip
    return result, output, gate, statistics if differentiated else None, total, normed


def _fake(x: Tensor, query_weight: Tensor | None, *args: Any) -> tuple[Tensor | None, ...]:
    """Returns tensors like those of `_forward`, without values."""
    heads, height, width, dtype, differentiated = *args[9:12], *args[15:17]
    batch, tokens, _ = x.shape
    gated = query_weight is not None
    return (
        torch.empty_like(x),
        empty_map(x, height, width, dtype),
        x.new_empty((batch, heads), dtype=accumulator(x)) if gated else None,
        x.new_empty((batch, 4, tokens), dtype=accumulator(x)) if differentiated else None,
        _total(x) if gated and differentiated else None,
        torch.empty_like(x, dtype=DTYPES[dtype]) if differentiated else None,
    )


def _total(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[2]), dtype=accumulator(x))


def empty_map(x: Tensor, height: int, width: int, dtype: int) -> Tensor:
    """Returns a map for O."""
    return torch.empty(
        (x.shape[0], x.shape[2], height, width), device=x.device, dtype=DTYPES[dtype], memory_format=torch.channels_last
    )


def _backward(
    arguments: tuple[Any, ...], results: tuple[Tensor | None, ...], grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the tensors among the arguments of `_forward`. The first is that of x' instead of x."""
    (
        grad, query_weight, key_weight, value_weight, previous, decay, gamma, beta, previous_gamma, previous_beta, mask,
        heads, height, width, add_prefix, _, _, dtype,
    ) = arguments  # fmt: skip
    _, _, gate, statistics, total, normed = results
    _, grad_next, grad_gate = grads
    assert statistics is not None
    assert normed is not None
    grad = grad.contiguous()
    if grad_next is not None:
        grad_next = grad_next.to(DTYPES[dtype]).contiguous(memory_format=torch.channels_last)
    sizes = Sizes.of(grad, previous, height, width)
    shape, tiles = sizes.shape, sizes.shape.tiles
    switches = {"NEXT": grad_next is not None, "GATED": gate is not None, "MASKED": mask is not None}
    grad_value = torch.empty((shape.batch, shape.pixels, shape.channels), device=grad.device, dtype=DTYPES[dtype])
    grad_gates = partial_sums(grad, shape)
    run_kernel(
        values_kernel, sizes.row_programs,
        normed, grad, either(grad_next, grad), value_weight, gamma, beta, either(gate, gamma), either(mask, gamma),
        grad_value, grad_gates, sizes.prefix, height, width, shape.channels, heads, tiles.segments, tiles.rows,
        **switches, LOADED=LOADED, **sizes.row_constants,
    )  # fmt: skip
    grad_pooled = grad_weights = None
    if gate is not None and total is not None:
        grad_pooled, grad_weights = gate_gradients(
            grad_gates, total, query_weight, key_weight, gate, grad_gate, heads, shape, 1
        )
    grad_x, grad_previous, grad_kernel, norms, grad_projections = input_gradients(
        grad, grad_next, grad_value, grad_pooled, grad_weights, normed, previous, statistics, value_weight, gamma, beta,
        previous_gamma, previous_beta, decay, mask, add_prefix, sizes,
    )  # fmt: skip
    size = 0 if query_weight is None else query_weight.shape[-1]
    return (
        grad_x,
        _like(query_weight, grad_projections[:size]),
        _like(key_weight, grad_projections[size:]),
        _like(value_weight, grad_kernel),
        grad_previous,
        _like(decay, norms[4]),
        _like(gamma, norms[0]),
        _like(beta, norms[1]),
        _like(previous_gamma, norms[2]),
        _like(previous_beta, norms[3]),
        None,
    )


def input_gradients(
    grad: Tensor,
    grad_next: Tensor | None,
    grad_value: Tensor,
    grad_pooled: Tensor | None,
    grad_weights: Tensor | None,
    normed: Tensor,
    previous: Tensor | None,
    statistics: Tensor,
    value_weight: Tensor,
    gamma: Tensor,
    beta: Tensor,
    previous_gamma: Tensor | None,
    previous_beta: Tensor | None,
    decay: Tensor | None,
    mask: Tensor | None,
    add_prefix: bool,
    sizes: Sizes,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Computes the gradients through the convolution and the norms.

    Args:
        grad: g, the gradient of x'.
        grad_next: The gradient of O from the next layer.
        grad_value: du, [B, H W, C].
        grad_pooled: The gradient of each token of n through the average, [B, C].
        grad_weights: Partial sums of the gradients of the weights of q and k, [splits, 2, k].
        normed: n^, [B, P + H W, C].

    Returns:
        dx, dO', and the gradients of the 3x3 weight, [9 C], of γ, β, γ', β' and lambda, [5, C], and of the weights of q
        and k, [2 k].
    """
    shape, tokens, tiles = sizes.shape, sizes.tokens, sizes.shape.tiles
    height, width = shape.height, shape.width
    grad_normed = torch.empty_like(grad_value)
    products = partial_sums(grad, shape, 9, grouped=True)
    run_kernel(
        convolution_kernel, shape.programs,
        grad_value, normed, value_weight, gamma, beta, grad_normed, products, sizes.prefix, height, width,
        shape.channels, shape.batch, tiles.samples, tiles.segments, tiles.rows, **sizes.tile_constants,
    )  # fmt: skip
    grad_x = torch.empty_like(grad)
    grad_previous = None if previous is None else torch.empty_like(previous)
    programs = sizes.gradient_programs
    sums = torch.empty((programs, 4, shape.channels), device=grad.device, dtype=shape.acc)
    run_kernel(
        norms_kernel, (programs,),
        normed, either(previous, normed), grad, either(grad_next, grad), grad_normed, either(grad_pooled, sums),
        statistics, gamma, either(previous_gamma, gamma), either(decay, gamma), either(mask, gamma), grad_x,
        either(grad_previous, grad_x), sums,
        shape.batch * tokens, tokens, sizes.previous_tokens, sizes.prefix, shape.channels,
        PREVIOUS=previous is not None, DECAY=decay is not None, ADD_PREFIX=add_prefix, NEXT=grad_next is not None,
        GATED=grad_pooled is not None, MASKED=mask is not None,
        **sizes.constants,
    )  # fmt: skip
    size = 0 if grad_weights is None else grad_weights.shape[-1]
    grads_of_weights = torch.empty(14 * shape.channels + 2 * size, device=grad.device, dtype=shape.acc)
    grad_kernel, grad_norms, grad_projections = grads_of_weights.split(
        (9 * shape.channels, 5 * shape.channels, 2 * size)
    )
    block = min(32, max(16, power_of_2(shape.channels)))
    run_kernel(
        sums_kernel, (13, pieces(max(shape.channels, 2 * size), block)),
        products, sums, either(grad_weights, sums), either(previous_gamma, gamma), either(previous_beta, beta),
        either(decay, gamma), grad_kernel, grad_norms, grad_projections, shape.channels, len(products), programs,
        0 if grad_weights is None else len(grad_weights), 2 * size,
        PREVIOUS=previous is not None, DECAY=decay is not None, SPLITS=SPLITS, CHANNELS=block, ACC=TYPES[shape.acc],
    )  # fmt: skip
    return grad_x, grad_previous, grad_kernel, grad_norms.view(5, shape.channels), grad_projections


def _like(parameter: Tensor | None, grad: Tensor) -> Tensor | None:
    return None if parameter is None else grad.to(parameter.dtype).view(parameter.shape)


_layer = DifferentiableOperator(
    "light_tokens",
    _forward,
    _backward,
    _fake,
    outputs=3,
    results=6,
    keep=lambda args, results: (None, None, *results[2:]),  # all but x' and O
    constant=("mask",),
    unread={"x": 0},
)


def unsupported_reason(
    x: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    value_weight: Tensor,
    previous: Tensor | None,
    decay: Tensor | None,
    norm: LayerNormArguments,
    norm_previous: LayerNormArguments | None = None,
    mask: Tensor | None = None,
    *,
    heads: int,
    grid: tuple[int, int],
    prefix: int = 0,
    add_prefix: bool = False,
) -> str | None:
    parameters = [query_weight, key_weight, value_weight, decay, mask, norm.weight, norm.bias]
    parameters += [] if norm_previous is None else [norm_previous.weight, norm_previous.bias]
    if is_traced_otherwise(x, previous, *parameters):  # checked before any size is read, which would add a guard
        return TRACED
    reason = tokens_unsupported_reason(x, query_weight, key_weight, value_weight, parameters, heads, grid, prefix)
    if reason is not None:
        return reason
    if query_weight is None and norm_previous is not None:
        return "without q and k there is no memory"
    if previous is not None:
        if norm_previous is None:
            return "the previous output must have a norm"
        if previous.shape != (x.shape if previous.dim() == 3 else (x.shape[0], x.shape[2], *grid)):
            return f"the previous output must have the shape of the tokens or of their map, got {tuple(previous.shape)}"
    return None


def tokens_unsupported_reason(
    x: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    value_weight: Tensor,
    parameters: Sequence[Tensor | None],
    heads: int,
    grid: tuple[int, int],
    prefix: int,
) -> str | None:
    """Returns which limit of the kernels of all layers in transformers the arguments exceed, or None."""
    if x.dtype not in TYPES:
        return f"the tokens must be of floating point, got {x.dtype}"
    if not x.numel():
        return "there are no tokens"
    if x.shape[1] != prefix + grid[0] * grid[1]:
        return f"the patch tokens must fill the grid, got {x.shape[1] - prefix} and {grid[0]} x {grid[1]}"
    if x.numel() // x.shape[0] >= 2**31:
        return "the tokens of one sample must have less than 2^31 elements"
    if x.shape[2] > MOST_CHANNELS:
        return f"a token must have at most {MOST_CHANNELS} channels, got {x.shape[2]}"
    reason = attention_unsupported_reason(query_weight, key_weight, value_weight, x.shape[2], heads)
    if reason is not None:
        return reason
    dtype = autocast_type(x)
    if dtype is not None and torch.promote_types(x.dtype, dtype) != x.dtype:
        return f"the tokens must not be narrower than the autocast dtype, got {x.dtype} and {dtype}"
    if not all(p is None or p.is_contiguous() for p in parameters):
        return "the parameters and masks must be contiguous"
    return device_unsupported_reason(x)


def light_tokens(
    x: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    value_weight: Tensor,
    previous: Tensor | None,
    decay: Tensor | None,
    norm: LayerNormArguments,
    norm_previous: LayerNormArguments | None = None,
    mask: Tensor | None = None,
    *,
    heads: int,
    grid: tuple[int, int],
    prefix: int = 0,
    add_prefix: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    x = x.contiguous()  # without a class token, timm's first block returns tokens [B, N, C] that lie as [B, C, N]
    if previous is not None:
        layout = torch.contiguous_format if previous.dim() == 3 else torch.channels_last
        previous = previous.contiguous(memory_format=layout)
    gamma, beta, previous_eps = (None, None, 0.0) if norm_previous is None else norm_previous
    arguments = (
        x, query_weight, key_weight, value_weight, previous, decay, norm.weight, norm.bias, gamma, beta, mask,
        heads, *grid, add_prefix and prefix > 0, norm.eps, previous_eps, DTYPES.index(autocast_type(x) or x.dtype),
    )  # fmt: skip
    if not torch.compiler.is_compiling():
        return _layer(*arguments)
    result, output, gate, *_ = _layer.traced(*arguments)
    return result, output, None if query_weight is None else gate
