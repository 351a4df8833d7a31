"""Kernels of the forward pass of a layer with MRLA-light. See `light_layer.py` for their order."""

import triton
import triton.language as tl

from .batch_norm import running_statistics, scale_and_shift, store_moments, store_table
from .light_layer_parts import (
    append,
    block_output,
    gates_of_channels,
    heads_and_channels,
    load_gate,
    program_and_channels,
    projections,
    relu,
    three_weights,
)
from .map_shape import SIZES


@triton.jit(do_not_specialize_on_alignment=SIZES)
def end_kernel(
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


@triton.jit(do_not_specialize_on_alignment=SIZES)
def gate_kernel(
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
    head, places, inside = heads_and_channels(channels, heads, HEADS, DEPTH)
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


@triton.jit(do_not_specialize=["number_earlier", "first_earlier", "layers"], do_not_specialize_on_alignment=SIZES)
def attention_kernel(
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


@triton.jit(do_not_specialize_on_alignment=SIZES)
def sum_kernel(
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
