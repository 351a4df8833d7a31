"""Device functions that the forward and the backward kernels of a layer with MRLA share."""

import triton
import triton.language as tl


@triton.jit
def program_and_channels(channels, CHANNELS: tl.constexpr):
    """Returns the number of a program and its channels. Programs that run together read neighboring channels."""
    chunks = (channels + CHANNELS - 1) // CHANNELS
    return tl.program_id(0) // chunks, (tl.program_id(0) % chunks) * CHANNELS + tl.arange(0, CHANNELS)


@triton.jit
def block_output(z, s_ptr, places, mask, scale, shift, SHORTCUT: tl.constexpr, RELU: tl.constexpr, ACC: tl.constexpr):
    """Returns x = ReLU(scale z + shift + s), 0 outside of the mask, and where its gradient is not zero."""
    x = z * scale[None, :] + shift[None, :]
    if SHORTCUT:
        x += tl.load(s_ptr + places, mask=mask, other=0.0).to(ACC)
    alive = mask
    if RELU:
        alive = mask & ((x > 0) | (x != x))  # NaN stays NaN
    return tl.where(alive, x, 0.0), alive


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
def project(
    pooled_ptr,  # [batch, segments, channels]
    weight_ptr,  # [size], of q or of k
    start,
    places,
    inside,
    channels,
    segments,
    size,
    divisor,
    ACC: tl.constexpr,
):
    """Returns the convolution over the channels of the averages of one sample, at the given channels."""
    projected = tl.zeros(places.shape, ACC)
    for segment in range(segments):
        for offset in range(size):
            neighbours = places + offset - size // 2
            mask = inside & (neighbours >= 0) & (neighbours < channels)
            value = tl.load(pooled_ptr + start + segment * channels + neighbours, mask=mask, other=0.0).to(ACC)
            projected += value * tl.load(weight_ptr + offset).to(ACC)
    return projected / divisor
