"""Device functions that the forward and the backward kernels of a layer with MRLA share."""

import triton
import triton.language as tl

SEGMENTS = tl.constexpr(16)  # of a sample, whose sums are loaded at once
OFFSETS = tl.constexpr(4)  # neighbors of a channel for which they are loaded at once


@triton.jit
def program_and_channels(channels, CHANNELS: tl.constexpr):
    """Returns the number of a program and its channels. Programs that run together read neighboring channels."""
    chunks = (channels + CHANNELS - 1) // CHANNELS
    return tl.program_id(0) // chunks, (tl.program_id(0) % chunks) * CHANNELS + tl.arange(0, CHANNELS)


@triton.jit
def heads_and_channels(channels, heads, HEADS: tl.constexpr, DEPTH: tl.constexpr):
    """Returns the heads of a program, [HEADS], their channels, [HEADS, DEPTH], and which of these there are."""
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    depth = channels // heads
    within = tl.arange(0, DEPTH)
    places = head[:, None] * depth + within[None, :]
    inside = (head < heads)[:, None] & (within < depth)[None, :]
    return head, places, inside


@triton.jit
def block_output(
    z, s_ptr, places, mask, scale, shift, s_scale, s_shift,
    SHORTCUT: tl.constexpr, PROJECTED: tl.constexpr, RELU: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Returns x = ReLU(scale z + shift + s), 0 outside of the mask, where its gradient is not zero, and s.

    If the shortcut is projected, s = s_scale z' + s_shift is computed from the output z' of its convolution.
    """
    x = z * scale[None, :] + shift[None, :]
    s = x
    if SHORTCUT:
        s = tl.load(s_ptr + places, mask=mask, other=0.0).to(ACC)
        if PROJECTED:
            s = s * s_scale[None, :] + s_shift[None, :]
            s = tl.where(mask, s, 0.0).to(s_ptr.dtype.element_ty).to(ACC)  # x > 0 where it was in the forward pass
        x += s
    alive = mask
    if RELU:
        alive = mask & ((x > 0) | (x != x))  # NaN stays NaN
    return tl.where(alive, x, 0.0), alive, s


@triton.jit
def affine(table_ptr, columns, inside, channels, GIVEN: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr):
    """Returns scale and shift of a norm, given its table."""
    scale = tl.zeros([CHANNELS], ACC)
    shift = tl.zeros([CHANNELS], ACC)
    if GIVEN:
        scale = tl.load(table_ptr + 2 * channels + columns, mask=inside, other=0.0)
        shift = tl.load(table_ptr + 3 * channels + columns, mask=inside, other=0.0)
    return scale, shift


@triton.jit
def append(items, item):
    """Returns a tuple with one more item."""
    return items + (item,)  # noqa: RUF005  # Triton does not support (*items, item)


@triton.jit
def relu(x):
    """Returns ReLU(x)."""
    return tl.where(x <= 0, 0.0, x)  # NaN stays NaN


@triton.jit
def load_gate(gate_ptr, sample, columns, inside, channels, heads, layers, layer, ACC: tl.constexpr):
    """Returns the gate of a sample and layer at each channel, of [batch, heads, layers]."""
    head = sample * heads + columns // (channels // heads)
    return tl.load(gate_ptr + head * layers + layer, mask=inside, other=0.0).to(ACC)


@triton.jit
def three_weights(weight_ptr, start: tl.constexpr, columns, inside, ACC: tl.constexpr):
    """Returns three weights of each channel."""
    places = weight_ptr + columns * 9 + start
    return (
        tl.load(places, mask=inside, other=0.0).to(ACC),
        tl.load(places + 1, mask=inside, other=0.0).to(ACC),
        tl.load(places + 2, mask=inside, other=0.0).to(ACC),
    )


@triton.jit
def projections(
    pooled_ptr,  # [batch, segments, channels]
    query_ptr,  # [size]
    key_ptr,  # [size]
    start,
    places,
    inside,
    channels,
    segments,
    size,
    divisor,
    ACC: tl.constexpr,
):
    """Returns q and k of one sample at the given channels: convolutions over the channels of the averages."""
    query = tl.zeros(places.shape, ACC)
    key = tl.zeros(places.shape, ACC)
    for begin in range(0, segments * size, 8):
        for step in tl.static_range(8):  # eight loads at once, because each of them takes long
            offset = (begin + step) % size
            segment = (begin + step) // size
            neighbours = places + offset - size // 2
            mask = inside & (neighbours >= 0) & (neighbours < channels) & (neighbours * 0 + segment < segments)
            value = tl.load(pooled_ptr + start + segment * channels + neighbours, mask=mask, other=0.0).to(ACC)
            query += value * tl.load(query_ptr + offset).to(ACC)
            key += value * tl.load(key_ptr + offset).to(ACC)
    return query / divisor, key / divisor


@triton.jit
def gates_of_channels(
    pooled_ptr, query_ptr, key_ptr, sample, columns, inside, channels, segments, size, divisor, score_scale,
    DEPTH: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Returns the gate of each channel of one sample, for heads of DEPTH channels that lie inside of the tile."""
    pooled_ptr += sample.to(tl.int64) * segments * channels
    query = tl.zeros([CHANNELS], ACC)
    key = tl.zeros([CHANNELS], ACC)
    segment = tl.arange(0, SEGMENTS)
    for first in range(0, segments, SEGMENTS):
        for begin in range(0, size, OFFSETS):
            for step in tl.static_range(OFFSETS):  # the segments of several neighbors at once: each load takes long
                offset = begin + step
                neighbors = columns + offset - size // 2
                known = inside & (neighbors >= 0) & (neighbors < channels) & (neighbors * 0 + offset < size)
                places = (first + segment)[:, None] * channels + neighbors[None, :]
                mask = (first + segment < segments)[:, None] & known[None, :]
                value = tl.sum(tl.load(pooled_ptr + places, mask=mask, other=0.0).to(ACC), 0)
                within = tl.minimum(offset, size - 1)
                query += value * tl.load(query_ptr + within).to(ACC)
                key += value * tl.load(key_ptr + within).to(ACC)
    query = query / divisor
    key = key / divisor
    products = tl.reshape(tl.where(inside, query * key, 0.0), [CHANNELS // DEPTH, DEPTH])
    gate = 1.0 / (1.0 + tl.exp(-tl.sum(products, 1) * score_scale))
    return tl.reshape(tl.broadcast_to(gate[:, None], [CHANNELS // DEPTH, DEPTH]), [CHANNELS])
