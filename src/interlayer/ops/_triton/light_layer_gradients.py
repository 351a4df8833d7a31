"""Kernels of the backward pass of a layer with MRLA-light. See `light_layer.py` for their order.

Let g be the gradient of x', dO that of O, and m the factor of stochastic depth. With O^ = (O - mean) / std,

    dO    = (m g - mean(m g) - O^ mean(m g O^)) scale + what the next layer gives
    dV    = gate dO,  dO' = lambda dO
    dx    = g + the transposed 3x3 convolution of dV + dy / pixels
    dgate = sum over pixels of dO V = sum over pixels of x times the transposed convolution of dO

so that V is not needed, and one kernel that reads dO at a pixel and its neighbors computes both dx and dgate, and with
the products of x and dO the gradient of the 3x3 weight. Only dy, which depends on dgate, has to be added later.
"""

import triton
import triton.language as tl

from .light_layer_parts import (
    affine,
    append,
    block_output,
    heads_and_channels,
    load_gate,
    program_and_channels,
    projections,
    three_weights,
)
from .map_shape import SIZES


@triton.jit
def output_gradient(
    norm_sums_ptr, table_ptr, mask_ptr, sample, columns, inside, channels, count,
    MASKED: tl.constexpr, TRAINING: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Returns the coefficients of dO = (m g - mean(m g) - O^ mean(m g O^)) scale = factor g + slope O + constant."""
    scale = tl.load(table_ptr + 2 * channels + columns, mask=inside, other=0.0)
    factor = scale
    if MASKED:
        factor = scale * tl.load(mask_ptr + sample).to(ACC)
    slope = scale * 0.0
    constant = scale * 0.0
    if TRAINING:
        mean = tl.load(table_ptr + columns, mask=inside, other=0.0)
        inverse_std = tl.load(table_ptr + channels + columns, mask=inside, other=0.0)
        average = tl.load(norm_sums_ptr + columns, mask=inside, other=0.0) / count
        correlated = tl.load(norm_sums_ptr + channels + columns, mask=inside, other=0.0) / count
        slope = -correlated * inverse_std * scale
        constant = -average * scale - slope * mean
    return factor, slope, constant


@triton.jit
def load_gradient(
    grad_ptr, output_ptr, next_ptr, factor, slope, constant, places, mask, NEXT: tl.constexpr, ACC: tl.constexpr
):
    """Returns g and dO."""
    grad = tl.load(grad_ptr + places, mask=mask, other=0.0).to(ACC)
    output = tl.load(output_ptr + places, mask=mask, other=0.0).to(ACC)
    result = grad * factor[None, :] + output * slope[None, :] + constant[None, :]
    if NEXT:
        result += tl.load(next_ptr + places, mask=mask, other=0.0).to(ACC)
    return grad, tl.where(mask, result, 0.0)


@triton.jit
def with_dead_pixels(grad, alive, dead, DTYPE: tl.constexpr, ACC: tl.constexpr):
    """Returns the gradient of x, `dead`, which is -0, where the ReLU of x stopped it, and never -0 elsewhere."""
    if DTYPE == tl.float16:  # small numbers become 0  # noqa: SIM300
        grad = grad.to(DTYPE).to(ACC)
    return tl.where(alive, grad + 0.0, dead)  # -0 + 0 = 0


@triton.jit
def is_dead(grad, ACC: tl.constexpr):
    """Returns where the gradient that `with_dead_pixels` returned is -0."""
    if grad.dtype.primitive_bitwidth == 16:
        bits = grad.to(tl.int16, bitcast=True)
    elif grad.dtype.primitive_bitwidth == 32:
        bits = grad.to(tl.int32, bitcast=True)
    else:
        bits = grad.to(tl.int64, bitcast=True)
    return (bits < 0) & (grad.to(ACC) == 0)


@triton.jit(do_not_specialize_on_alignment=SIZES)
def gradient_kernel(
    grad_ptr,  # [batch, height, width, channels]: g
    output_ptr,  # [batch, height, width, channels]: O
    next_ptr,  # [batch, height, width, channels]: gradient of O from the next layer
    x_ptr,  # [batch, height, width, channels]: x, or z if there is an end
    s_ptr,  # [batch, height, width, channels]: the shortcut, or the input of its norm
    previous_ptr,  # [batch, height, width, channels]: O'
    weight_ptr,  # [channels, 9]
    gate_ptr,  # [batch, heads]
    decay_ptr,  # [channels]
    mask_ptr,  # [batch]
    table_ptr,  # [4, channels]: of the norm of O
    end_table_ptr,  # [4, channels]: of the norm of z
    s_table_ptr,  # [4, channels]: of the norm of the shortcut
    norm_sums_ptr,  # [2, channels]: sums of m g and of m g O^
    grad_x_ptr,  # [batch, height, width, channels]: gradient of x without that of its average, -0 where x = 0
    grad_previous_ptr,  # [batch, height, width, channels]: gradient of O'
    grad_gate_ptr,  # [batch, segments, channels]: sums of dO V
    products_ptr,  # [groups * segments, 12, channels]: of the 3x3 weight and lambda, sums of dx and dx (z - mean)
    height,
    width,
    channels,
    heads,
    batch,
    samples,
    segments,
    rows,
    count,  # pixels of the batch
    NEXT: tl.constexpr,
    GATED: tl.constexpr,
    PREVIOUS: tl.constexpr,
    IS_SHORTCUT: tl.constexpr,  # O' is the shortcut of the block
    DECAY: tl.constexpr,
    END: tl.constexpr,
    SHORTCUT: tl.constexpr,
    PROJECTED: tl.constexpr,  # the shortcut is computed from the input of its norm
    RELU: tl.constexpr,
    MASKED: tl.constexpr,
    TRAINING: tl.constexpr,
    STAGES: tl.constexpr,
    DIRECT: tl.constexpr,  # in a layer with MRLA-base: dV is given as next_ptr
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    program, columns = program_and_channels(channels, CHANNELS)
    inside = columns < channels
    earliest = (program // segments) * samples
    segment = program % segments
    first = segment * rows
    last = tl.minimum(first + rows, height)
    begin = tl.maximum(first - 1, 0)
    stride = width * channels
    decay = tl.full([CHANNELS], 1.0, ACC)
    if DECAY:
        decay = tl.load(decay_ptr + columns, mask=inside, other=0.0).to(ACC)
    w00, w01, w02 = three_weights(weight_ptr, 0, columns, inside, ACC)
    w10, w11, w12 = three_weights(weight_ptr, 3, columns, inside, ACC)
    w20, w21, w22 = three_weights(weight_ptr, 6, columns, inside, ACC)
    scale = decay
    shift = decay
    mean = decay
    if END:
        mean = tl.load(end_table_ptr + columns, mask=inside, other=0.0)
        scale = tl.load(end_table_ptr + 2 * channels + columns, mask=inside, other=0.0)
        shift = tl.load(end_table_ptr + 3 * channels + columns, mask=inside, other=0.0)
    s_scale, s_shift = affine(s_table_ptr, columns, inside, channels, PROJECTED, CHANNELS, ACC)
    p00 = tl.zeros([COLUMNS, CHANNELS], ACC)
    p01 = tl.zeros([COLUMNS, CHANNELS], ACC)
    p02 = tl.zeros([COLUMNS, CHANNELS], ACC)
    p10 = tl.zeros([COLUMNS, CHANNELS], ACC)
    p11 = tl.zeros([COLUMNS, CHANNELS], ACC)
    p12 = tl.zeros([COLUMNS, CHANNELS], ACC)
    p20 = tl.zeros([COLUMNS, CHANNELS], ACC)
    p21 = tl.zeros([COLUMNS, CHANNELS], ACC)
    p22 = tl.zeros([COLUMNS, CHANNELS], ACC)
    dead = tl.zeros([COLUMNS, CHANNELS], ACC) * -1.0  # Triton takes -0.0 for 0
    decayed = tl.zeros([COLUMNS, CHANNELS], ACC)
    total = tl.zeros([COLUMNS, CHANNELS], ACC)
    correlated = tl.zeros([COLUMNS, CHANNELS], ACC)
    for index in range(tl.minimum(batch - earliest, samples)):
        sample = earliest + index
        start = sample.to(tl.int64) * height * stride  # within a sample, offsets of 32 bits suffice
        grad_here = grad_ptr + start
        output_here = output_ptr + start
        next_here = next_ptr + start
        x_here = x_ptr + start
        s_here = s_ptr + start
        previous_here = previous_ptr + start
        grad_x_here = grad_x_ptr + start
        grad_previous_here = grad_previous_ptr + start
        factor, slope, constant = output_gradient(
            norm_sums_ptr, table_ptr, mask_ptr, sample, columns, inside, channels, count, MASKED, TRAINING, ACC
        )
        gate = tl.full([CHANNELS], 1.0, ACC)
        if GATED:
            gate = load_gate(gate_ptr, sample, columns, inside, channels, heads, 1, 0, ACC)
        through_value = tl.zeros([COLUMNS, CHANNELS], ACC)
        for left in range(0, width, COLUMNS):
            w = left + tl.arange(0, COLUMNS)
            across = (w < width)[:, None] & inside[None, :]
            from_left = ((w >= 1) & (w <= width))[:, None] & inside[None, :]
            from_right = (w < width - 1)[:, None] & inside[None, :]
            offsets = w[:, None] * channels + columns[None, :]
            # dO of the two rows above, at the pixel to the left, the pixel and the pixel to the right
            a0 = tl.zeros([COLUMNS, CHANNELS], ACC)
            a1 = tl.zeros([COLUMNS, CHANNELS], ACC)
            a2 = tl.zeros([COLUMNS, CHANNELS], ACC)
            b0 = tl.zeros([COLUMNS, CHANNELS], ACC)
            b1 = tl.zeros([COLUMNS, CHANNELS], ACC)
            b2 = tl.zeros([COLUMNS, CHANNELS], ACC)
            grad_above = tl.zeros([COLUMNS, CHANNELS], ACC)
            for row in tl.range(begin, last + 1, num_stages=STAGES):
                exists = (w * 0 + row < height)[:, None]  # the interpreter splats no bool
                places = row * stride + offsets
                known_left, known, known_right = from_left & exists, across & exists, from_right & exists
                if DIRECT:
                    c0 = tl.load(next_here + places - channels, mask=known_left, other=0.0).to(ACC)
                    c1 = tl.load(next_here + places, mask=known, other=0.0).to(ACC)
                    c2 = tl.load(next_here + places + channels, mask=known_right, other=0.0).to(ACC)
                else:
                    _, c0 = load_gradient(
                        grad_here, output_here, next_here, factor, slope, constant, places - channels, known_left,
                        NEXT, ACC,
                    )  # fmt: skip
                    grad, c1 = load_gradient(
                        grad_here, output_here, next_here, factor, slope, constant, places, known, NEXT, ACC
                    )
                    _, c2 = load_gradient(
                        grad_here, output_here, next_here, factor, slope, constant, places + channels, known_right,
                        NEXT, ACC,
                    )  # fmt: skip
                # x at (i, j) entered V at (i + 1 - di, j + 1 - dj)
                places -= stride
                ready = across & (w * 0 + row > first)[:, None]  # the row above has all its neighbours
                through = w00[None, :] * c2 + w01[None, :] * c1 + w02[None, :] * c0
                through += w10[None, :] * b2 + w11[None, :] * b1 + w12[None, :] * b0
                through += w20[None, :] * a2 + w21[None, :] * a1 + w22[None, :] * a0
                convolved = through
                if DIRECT:
                    grad_above = tl.load(grad_here + places, mask=ready, other=0.0).to(ACC)
                through = grad_above + gate[None, :] * through
                x = tl.load(x_here + places, mask=ready, other=0.0).to(ACC)
                if END:
                    z = x - mean[None, :]
                    x, alive, shortcut = block_output(
                        x, s_here, places, ready, scale, shift, s_scale, s_shift, SHORTCUT, PROJECTED, RELU, ACC
                    )
                    through = with_dead_pixels(through, alive, dead, grad_x_ptr.dtype.element_ty, ACC)
                    total += through
                    correlated += through * z
                if GATED:
                    through_value += x * convolved
                tl.store(grad_x_here + places, through.to(grad_x_ptr.dtype.element_ty), mask=ready)
                if IS_SHORTCUT:
                    decayed += b1 * shortcut
                elif PREVIOUS:
                    decayed += b1 * tl.load(previous_here + places, mask=ready, other=0.0).to(ACC)
                    memory = decay[None, :] * b1
                    tl.store(grad_previous_here + places, memory.to(grad_x_ptr.dtype.element_ty), mask=ready)
                x *= gate[None, :]
                p00 += x * c2
                p01 += x * c1
                p02 += x * c0
                p10 += x * b2
                p11 += x * b1
                p12 += x * b0
                p20 += x * a2
                p21 += x * a1
                p22 += x * a0
                # Triton does not prefetch the loads of a loop that passes a value on unchanged
                a0 = b0 + 0.0
                a1 = b1 + 0.0
                a2 = b2 + 0.0
                b0 = c0
                b1 = c1
                b2 = c2
                if not DIRECT:
                    grad_above = grad
        if GATED:
            split = sample.to(tl.int64) * segments + segment
            tl.store(grad_gate_ptr + split * channels + columns, tl.sum(through_value, 0), mask=inside)
    store = products_ptr + program.to(tl.int64) * 12 * channels + columns
    tl.store(store, tl.sum(p00, 0), mask=inside)
    tl.store(store + channels, tl.sum(p01, 0), mask=inside)
    tl.store(store + 2 * channels, tl.sum(p02, 0), mask=inside)
    tl.store(store + 3 * channels, tl.sum(p10, 0), mask=inside)
    tl.store(store + 4 * channels, tl.sum(p11, 0), mask=inside)
    tl.store(store + 5 * channels, tl.sum(p12, 0), mask=inside)
    tl.store(store + 6 * channels, tl.sum(p20, 0), mask=inside)
    tl.store(store + 7 * channels, tl.sum(p21, 0), mask=inside)
    tl.store(store + 8 * channels, tl.sum(p22, 0), mask=inside)
    tl.store(store + 9 * channels, tl.sum(decayed, 0), mask=inside)
    if END:
        tl.store(store + 10 * channels, tl.sum(total, 0), mask=inside)
        tl.store(store + 11 * channels, tl.sum(correlated, 0), mask=inside)


@triton.jit(do_not_specialize_on_alignment=SIZES)
def scores_kernel(
    partial_ptr,  # [batch, segments, channels]: sums of dO V
    gate_ptr,  # [batch, heads]
    grad_gate_ptr,  # [batch, heads]: gradient of the gates that the layer returns
    pooled_ptr,  # [batch, pooled_segments, channels]: sums of x
    query_ptr,  # [size]
    key_ptr,  # [size]
    average_ptr,  # [batch, channels]: y
    grad_projections_ptr,  # [batch, 2, channels]: gradients of q and k
    channels,
    segments,
    pooled_segments,
    size,
    pixels,
    heads,
    score_scale,
    RETURNED: tl.constexpr,
    HEADS: tl.constexpr,
    DEPTH: tl.constexpr,
    ACC: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    head, places, inside = heads_and_channels(channels, heads, HEADS, DEPTH)
    total = tl.zeros([HEADS, DEPTH], ACC)
    for segment in range(segments):
        start = partial_ptr + (sample * segments + segment) * channels
        total += tl.load(start + places, mask=inside, other=0.0)
    grad = tl.sum(total, 1)
    if RETURNED:
        grad += tl.load(grad_gate_ptr + sample * heads + head, mask=head < heads, other=0.0).to(ACC)
    gate = tl.load(gate_ptr + sample * heads + head, mask=head < heads, other=0.0).to(ACC)
    grad = (grad * gate * (1.0 - gate) * score_scale)[:, None]
    start = sample * pooled_segments * channels
    query, key = projections(
        pooled_ptr, query_ptr, key_ptr, start, places, inside, channels, pooled_segments, size, pixels, ACC
    )
    average = tl.zeros([HEADS, DEPTH], ACC)
    for segment in range(pooled_segments):
        average += tl.load(pooled_ptr + start + segment * channels + places, mask=inside, other=0.0)
    tl.store(average_ptr + sample * channels + places, average / pixels, mask=inside)
    grad_projections_ptr += sample * 2 * channels
    tl.store(grad_projections_ptr + places, grad * key, mask=inside)
    tl.store(grad_projections_ptr + channels + places, grad * query, mask=inside)


@triton.jit(do_not_specialize_on_alignment=SIZES)
def pooled_kernel(
    average_ptr,  # [batch, channels]: y
    grad_projections_ptr,  # [batch, 2, channels]: gradients of q and k
    query_ptr,  # [size]
    key_ptr,  # [size]
    grad_pooled_ptr,  # [batch, channels]: gradient of each pixel of x through the average
    grad_weights_ptr,  # [batch, chunks, 2, size]: gradients of the weights of q and k
    channels,
    size,
    pixels,
    STEPS: tl.constexpr,  # weights whose gradients are loaded before they are summed
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = columns < channels
    average = tl.load(average_ptr + sample * channels + columns, mask=inside, other=0.0)
    grad_projections_ptr += sample * 2 * channels
    grad_weights_ptr += (sample * tl.num_programs(1) + tl.program_id(1)) * 2 * size
    grad = tl.zeros([CHANNELS], ACC)
    for begin in range(0, size, STEPS):
        grads_query = ()  # all are loaded before the first sum, which has to wait
        grads_key = ()
        for step in tl.static_range(STEPS):
            # channel c entered q at the channel c - offset + size // 2
            offset = begin + step
            there = columns - offset + size // 2
            mask = inside & (there >= 0) & (there < channels) & (there * 0 + offset < size)
            grad_query = tl.load(grad_projections_ptr + there, mask=mask, other=0.0)
            grad_key = tl.load(grad_projections_ptr + channels + there, mask=mask, other=0.0)
            known = offset < size
            grad += grad_query * tl.load(query_ptr + offset, mask=known, other=0.0).to(ACC)
            grad += grad_key * tl.load(key_ptr + offset, mask=known, other=0.0).to(ACC)
            grads_query = append(grads_query, grad_query)
            grads_key = append(grads_key, grad_key)
        for step in tl.static_range(STEPS):
            offset = begin + step
            known = offset < size
            tl.store(grad_weights_ptr + offset, tl.sum(grads_query[step] * average, 0), mask=known)
            tl.store(grad_weights_ptr + size + offset, tl.sum(grads_key[step] * average, 0), mask=known)
    tl.store(grad_pooled_ptr + sample * channels + columns, grad / pixels, mask=inside)


@triton.jit(do_not_specialize_on_alignment=SIZES)
def weights_kernel(
    products_ptr,  # [groups * segments, 12, channels]
    active_ptr,  # [batch, segments, 2, channels]
    grad_pooled_ptr,  # [batch, channels]
    end_table_ptr,  # [4, channels]
    grads_ptr,  # gradients of the 3x3 weight, [channels, 9], then of lambda, and of beta and gamma of the end
    channels,
    splits,  # groups * segments
    active_splits,  # batch * segments
    segments,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    kind = tl.program_id(0)
    columns = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = columns < channels
    total = tl.zeros([SPLITS, CHANNELS], ACC)
    for start in range(0, splits, SPLITS):
        lines = (start + tl.arange(0, SPLITS)).to(tl.int64)
        mask = (lines < splits)[:, None] & inside[None, :]
        total += tl.load(
            products_ptr + (lines[:, None] * 12 + kind) * channels + columns[None, :], mask=mask, other=0.0
        )
    if GATED and kind > 9:  # dy reaches the pixels at which x > 0
        for start in range(0, active_splits, SPLITS):
            lines = (start + tl.arange(0, SPLITS)).to(tl.int64)
            mask = (lines < active_splits)[:, None] & inside[None, :]
            places = (lines[:, None] * 2 + kind - 10) * channels + columns[None, :]
            active = tl.load(active_ptr + places, mask=mask, other=0.0)
            places = (lines // segments)[:, None] * channels + columns[None, :]
            total += active * tl.load(grad_pooled_ptr + places, mask=mask, other=0.0)
    result = tl.sum(total, 0)
    if kind == 11:
        result *= tl.load(end_table_ptr + channels + columns, mask=inside, other=0.0)
    if kind < 9:
        tl.store(grads_ptr + columns * 9 + kind, result, mask=inside)
    else:
        tl.store(grads_ptr + kind * channels + columns, result, mask=inside)


@triton.jit(do_not_specialize_on_alignment=SIZES)
def finish_kernel(
    partial_ptr,  # [batch, pixels, channels]: gradient of x without that of its average, -0 where x = 0
    z_ptr,  # [batch, pixels, channels]
    grad_ptr,  # [batch, pixels, channels]: g
    output_ptr,  # [batch, pixels, channels]: O
    next_ptr,  # [batch, pixels, channels]
    decay_ptr,  # [channels]
    mask_ptr,  # [batch]
    table_ptr,  # [4, channels]
    norm_sums_ptr,  # [2, channels]
    end_table_ptr,  # [4, channels]
    grads_ptr,  # see `weights_kernel`
    grad_pooled_ptr,  # [batch, channels]
    grad_x_ptr,  # [batch, pixels, channels]: gradient of x, or of z if there is an end
    grad_shortcut_ptr,  # [batch, pixels, channels]
    pixels,
    pixels_per_segment,
    segments,
    channels,
    count,
    NEXT: tl.constexpr,
    GATED: tl.constexpr,
    IS_SHORTCUT: tl.constexpr,
    DECAY: tl.constexpr,
    END: tl.constexpr,
    SHORTCUT: tl.constexpr,
    MASKED: tl.constexpr,
    TRAINING: tl.constexpr,
    END_TRAINING: tl.constexpr,
    STAGES: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    program, columns = program_and_channels(channels, CHANNELS)
    inside = columns < channels
    sample = (program // segments).to(tl.int64)
    start = sample * pixels * channels
    partial_ptr += start
    z_ptr += start
    grad_ptr += start
    output_ptr += start
    next_ptr += start
    grad_x_ptr += start
    grad_shortcut_ptr += start
    first = (program % segments) * pixels_per_segment
    last = tl.minimum(first + pixels_per_segment, pixels)
    pooled = tl.zeros([CHANNELS], ACC)
    if GATED:
        pooled = tl.load(grad_pooled_ptr + sample * channels + columns, mask=inside, other=0.0)
    factor, slope, constant = output_gradient(
        norm_sums_ptr, table_ptr, mask_ptr, sample, columns, inside, channels, count, MASKED, TRAINING, ACC
    )
    decay = tl.full([CHANNELS], 1.0, ACC)
    if DECAY:
        decay = tl.load(decay_ptr + columns, mask=inside, other=0.0).to(ACC)
    scale = pooled
    end_slope = tl.zeros([CHANNELS], ACC)
    end_constant = tl.zeros([CHANNELS], ACC)
    if END:
        scale = tl.load(end_table_ptr + 2 * channels + columns, mask=inside, other=0.0)
        if END_TRAINING:
            mean = tl.load(end_table_ptr + columns, mask=inside, other=0.0)
            inverse_std = tl.load(end_table_ptr + channels + columns, mask=inside, other=0.0)
            average = tl.load(grads_ptr + 10 * channels + columns, mask=inside, other=0.0) / count
            correlated = tl.load(grads_ptr + 11 * channels + columns, mask=inside, other=0.0) / count
            end_slope = -correlated * inverse_std * scale
            end_constant = -average * scale - end_slope * mean
    for pixel in tl.range(first, last, PIXELS, num_stages=STAGES):
        lines = pixel + tl.arange(0, PIXELS)
        here = (lines < last)[:, None] & inside[None, :]
        places = lines[:, None] * channels + columns[None, :]
        partial = tl.load(partial_ptr + places, mask=here, other=0.0)
        grad_x = partial.to(ACC)
        if END:
            if GATED:
                grad_x += tl.where(is_dead(partial, ACC), 0.0, pooled[None, :])
            if SHORTCUT:
                shortcut = grad_x
                if IS_SHORTCUT:
                    _, memory = load_gradient(
                        grad_ptr, output_ptr, next_ptr, factor, slope, constant, places, here, NEXT, ACC
                    )
                    shortcut += decay[None, :] * memory
                tl.store(grad_shortcut_ptr + places, shortcut.to(grad_shortcut_ptr.dtype.element_ty), mask=here)
            grad_x *= scale[None, :]
            if END_TRAINING:
                z = tl.load(z_ptr + places, mask=here, other=0.0).to(ACC)
                grad_x += z * end_slope[None, :] + end_constant[None, :]
        else:
            grad_x += pooled[None, :]
        tl.store(grad_x_ptr + places, grad_x.to(grad_x_ptr.dtype.element_ty), mask=here)
