"""Kernels of a layer with MRLA-light in a transformer. See `light_tokens.py` for their order.

A hat marks what a LayerNorm returns without its weight and bias: n^ = (x - mean) / std, and O'^ likewise.
"""

import triton
import triton.language as tl

from .batch_norm import sum_of_splits
from .layer_norm import input_gradient, normalize
from .light_layer_parts import append, gates_of_channels, program_and_channels, three_weights


@triton.jit
def statistics_kernel(
    x_ptr,  # [batch, tokens, channels]
    previous_ptr,  # [batch, previous_tokens, channels]: O'
    gamma_ptr,  # [channels]
    beta_ptr,  # [channels]
    statistics_ptr,  # [batch, 4, tokens]: mean and 1 / std of x, and of O'
    sums_ptr,  # [batch, segments, channels]: sums of n over the patch tokens
    normed_ptr,  # [batch, tokens, channels]: n^
    tokens,
    previous_tokens,
    prefix,
    tokens_per_segment,
    segments,
    channels,
    eps,
    previous_eps,
    PREVIOUS: tl.constexpr,
    NORMED: tl.constexpr,  # whether n^ is stored
    STAGES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    sample = (tl.program_id(0) // segments).to(tl.int64)
    first = (tl.program_id(0) % segments) * tokens_per_segment
    last = tl.minimum(first + tokens_per_segment, tokens)
    columns = tl.arange(0, CHANNELS)
    inside = columns < channels
    x_ptr += sample * tokens * channels
    normed_ptr += sample * tokens * channels
    previous_ptr += (sample * previous_tokens + previous_tokens - tokens) * channels  # the patch tokens are the last
    statistics_ptr += sample * 4 * tokens
    total = tl.zeros([TOKENS, CHANNELS], ACC)
    for start in tl.range(first, last, TOKENS, num_stages=STAGES):
        token = start + tl.arange(0, TOKENS)
        known = token < last
        patch = known & (token >= prefix)
        places = token[:, None] * channels + columns[None, :]
        x = tl.load(x_ptr + places, mask=known[:, None] & inside[None, :], other=0.0).to(ACC)
        normed, mean, inverse_std = normalize(x, inside, channels, eps)
        tl.store(statistics_ptr + token, mean, mask=known)
        tl.store(statistics_ptr + tokens + token, inverse_std, mask=known)
        if NORMED:
            stored = known[:, None] & inside[None, :]
            tl.store(normed_ptr + places, normed.to(normed_ptr.dtype.element_ty), mask=stored)
        total += tl.where(patch[:, None], normed, 0.0)
        if PREVIOUS:
            previous = tl.load(previous_ptr + places, mask=patch[:, None] & inside[None, :], other=0.0).to(ACC)
            _, mean, inverse_std = normalize(previous, inside, channels, previous_eps)
            tl.store(statistics_ptr + 2 * tokens + token, mean, mask=patch)
            tl.store(statistics_ptr + 3 * tokens + token, inverse_std, mask=patch)
    count = tl.maximum(last - tl.maximum(first, prefix), 0)
    gamma = tl.load(gamma_ptr + columns, mask=inside, other=0.0).to(ACC)
    beta = tl.load(beta_ptr + columns, mask=inside, other=0.0).to(ACC)
    total_here = gamma * tl.sum(total, 0) + beta * count
    tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * channels + columns, total_here, mask=inside)


@triton.jit
def _load_normed(normed_ptr, token, known, columns, inside, gamma, beta, channels, ACC: tl.constexpr):
    """Returns n of some tokens, given n^, which is 0 where a token is not known."""
    places = token[:, None] * channels + columns[None, :]
    normed = tl.load(normed_ptr + places, mask=known[:, None] & inside[None, :], other=0.0).to(ACC)
    return tl.where(known[:, None], normed * gamma[None, :] + beta[None, :], 0.0)


@triton.jit
def load_row(
    x_ptr, statistics_ptr, row, left, columns, inside, gamma, beta, prefix, height, width, channels,
    WHOLE: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr, NORMED: tl.constexpr = False,
):  # fmt: skip
    """Returns n of a pixel to the left, COLUMNS pixels and a pixel to the right, 0 outside of the grid.

    With NORMED, `x_ptr` holds n^ instead of x, and the statistics are not read.
    """
    tokens = prefix + height * width
    normed = ()
    for index in tl.static_range(COLUMNS + 2):
        if WHOLE and (index == 0 or index == COLUMNS + 1):
            normed = append(normed, tl.zeros([CHANNELS], ACC))
        else:
            w = left + index - 1
            known = columns * 0 + row < height  # the interpreter splats no bool
            if not WHOLE:
                known = known & (columns * 0 + w >= 0) & (columns * 0 + w < width)
                w = tl.minimum(tl.maximum(w, 0), width - 1)
            token = prefix + tl.minimum(row, height - 1) * width + w
            value = tl.load(x_ptr + token * channels + columns, mask=known & inside, other=0.0).to(ACC)
            if not NORMED:
                mean = tl.load(statistics_ptr + token)
                inverse_std = tl.load(statistics_ptr + tokens + token)
                value = (value - mean) * inverse_std
            normed = append(normed, tl.where(known, value * gamma + beta, 0.0))
    return normed


@triton.jit
def known_pixel(columns, inside, column, width, WHOLE: tl.constexpr):
    """Returns which channels of a pixel there are: none beyond the last column, which parts of a row can reach."""
    known = inside
    if not WHOLE:
        known = inside & (columns * 0 + column < width)  # the interpreter splats no bool
    return known


@triton.jit
def zeros_of_row(COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr):
    """Returns a row of pixels of zeros."""
    row = ()
    for _ in tl.static_range(COLUMNS):
        row = append(row, tl.zeros([CHANNELS], ACC))
    return row


@triton.jit
def add_row(row, normed, w0, w1, w2, COLUMNS: tl.constexpr):
    """Returns a row of pixels plus the convolution of n with three weights."""
    added = ()
    for index in tl.static_range(COLUMNS):
        added = append(added, row[index] + w0 * normed[index] + w1 * normed[index + 1] + w2 * normed[index + 2])
    return added


@triton.jit
def store_prefix(
    x_ptr, statistics_ptr, sum_ptr, columns, inside, gamma, beta, factor, prefix, tokens, channels,
    ADD_PREFIX: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Stores the prefix tokens of x' of one sample."""
    for token in range(prefix):
        value = tl.load(x_ptr + token * channels + columns, mask=inside, other=0.0).to(ACC)
        if ADD_PREFIX:
            mean = tl.load(statistics_ptr + token)
            inverse_std = tl.load(statistics_ptr + tokens + token)
            value += factor * ((value - mean) * inverse_std * gamma + beta)
        tl.store(sum_ptr + token * channels + columns, value.to(sum_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gelu(u, ACC: tl.constexpr):
    """Returns the normal distribution function Φ(u), by which GELU multiplies u, and its derivative.

    In float32, erf is approximated to 1.5e-7 (Abramowitz and Stegun, 7.1.26), about the rounding error of 1 + erf.
    CUDA's erf takes more instructions, on which these kernels spend most of their time.
    """
    density = 0.3989422804014327 * tl.exp(-0.5 * u * u)
    if ACC == tl.float64:  # noqa: SIM300
        below = 0.5 + 0.5 * tl.erf(u * 0.7071067811865476)
    else:
        t = 1.0 / (1.0 + 0.2316418882 * tl.abs(u))  # 0.3275911 / sqrt(2)
        tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
        tail *= 1.2533141373155003 * density  # exp(-u² / 2) / 2
        below = tl.where(u < 0, tail, 1.0 - tail)
    return below, density


@triton.jit
def attention_kernel(
    x_ptr,  # [batch, tokens, channels]
    previous_ptr,  # [batch, previous_tokens, channels]: O'
    statistics_ptr,  # [batch, 4, tokens]
    weight_ptr,  # [channels, 9]
    gamma_ptr,  # [channels]
    beta_ptr,  # [channels]
    previous_gamma_ptr,  # [channels]
    previous_beta_ptr,  # [channels]
    decay_ptr,  # [channels]
    gate_ptr,  # [batch, heads]
    mask_ptr,  # [batch]
    output_ptr,  # [batch, height * width, channels]: O
    sum_ptr,  # [batch, tokens, channels]: x'
    pooled_ptr,  # [batch, pooled_segments, channels]: sums of n
    query_ptr,  # [size]
    key_ptr,  # [size]
    previous_tokens,
    prefix,
    height,
    width,
    channels,
    heads,
    segments,
    rows,
    pooled_segments,
    size,
    score_scale,
    GATED: tl.constexpr,
    DEPTH: tl.constexpr,  # channels of a head, if the gates are computed here, else 0
    PREVIOUS: tl.constexpr,
    DECAY: tl.constexpr,
    MASKED: tl.constexpr,
    ADD_PREFIX: tl.constexpr,
    WHOLE: tl.constexpr,
    LOADED: tl.constexpr,  # pixels that are loaded before any is stored
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    program, columns = program_and_channels(channels, CHANNELS)
    inside = columns < channels
    sample = (program // segments).to(tl.int64)  # within a sample, offsets of 32 bits suffice
    first = (program % segments) * rows
    last = tl.minimum(first + rows, height)
    pixels = height * width
    tokens = prefix + pixels
    x_ptr += sample * tokens * channels
    sum_ptr += sample * tokens * channels
    statistics_ptr += sample * 4 * tokens
    previous_ptr += (sample * previous_tokens + previous_tokens - tokens) * channels
    output_ptr += (sample * pixels - prefix) * channels
    w00, w01, w02 = three_weights(weight_ptr, 0, columns, inside, ACC)
    w10, w11, w12 = three_weights(weight_ptr, 3, columns, inside, ACC)
    w20, w21, w22 = three_weights(weight_ptr, 6, columns, inside, ACC)
    gamma = tl.load(gamma_ptr + columns, mask=inside, other=0.0).to(ACC)
    beta = tl.load(beta_ptr + columns, mask=inside, other=0.0).to(ACC)
    scale = tl.full([CHANNELS], 1.0, ACC)  # lambda gamma' and lambda beta'
    shift = tl.full([CHANNELS], 1.0, ACC)
    if PREVIOUS:
        scale = tl.load(previous_gamma_ptr + columns, mask=inside, other=0.0).to(ACC)
        shift = tl.load(previous_beta_ptr + columns, mask=inside, other=0.0).to(ACC)
        if DECAY:
            decay = tl.load(decay_ptr + columns, mask=inside, other=0.0).to(ACC)
            scale *= decay
            shift *= decay
    gate = tl.full([CHANNELS], 1.0, ACC)
    if DEPTH > 0:
        gate = gates_of_channels(
            pooled_ptr, query_ptr, key_ptr, sample, columns, inside, channels, pooled_segments, size, pixels,
            score_scale, DEPTH, CHANNELS, ACC,
        )  # fmt: skip
        one = inside & (columns % DEPTH == 0)  # all segments store the same
        tl.store(gate_ptr + sample * heads + columns // DEPTH, gate, mask=one)
    elif GATED:
        gate = tl.load(gate_ptr + sample * heads + columns // (channels // heads), mask=inside, other=0.0).to(ACC)
    factor = 1.0
    if MASKED:
        factor = tl.load(mask_ptr + sample).to(ACC)
    if first == 0:
        store_prefix(
            x_ptr,
            statistics_ptr,
            sum_ptr,
            columns,
            inside,
            gamma,
            beta,
            factor,
            prefix,
            tokens,
            channels,
            ADD_PREFIX,
            ACC,
        )
    for left in range(0, width, COLUMNS):
        above = zeros_of_row(COLUMNS, CHANNELS, ACC)  # u of the row above, without the row below it
        here = zeros_of_row(COLUMNS, CHANNELS, ACC)  # u of this row, without the rows below
        for row in range(tl.maximum(first - 1, 0), last + 1):
            normed = load_row(
                x_ptr, statistics_ptr, row, left, columns, inside, gamma, beta, prefix, height, width, channels,
                WHOLE, COLUMNS, CHANNELS, ACC,
            )  # fmt: skip
            above = add_row(above, normed, w20, w21, w22, COLUMNS)
            if row > first:  # the row above is complete
                for start in tl.static_range(0, COLUMNS, LOADED):
                    loaded = ()  # before anything is stored, so that the loads do not wait for each other
                    memories = ()
                    for offset in tl.static_range(LOADED):
                        if start + offset < COLUMNS:
                            known = known_pixel(columns, inside, left + start + offset, width, WHOLE)
                            token = prefix + (row - 1) * width + left + start + offset
                            places = token * channels + columns
                            x = tl.load(x_ptr + places, mask=known, other=0.0)  # again, from the cache
                            loaded = append(loaded, x)
                            if PREVIOUS:
                                memory = tl.load(previous_ptr + places, mask=known, other=0.0).to(ACC)
                                if not WHOLE:
                                    token = tl.minimum(token, tokens - 1)
                                mean = tl.load(statistics_ptr + 2 * tokens + token)
                                inverse_std = tl.load(statistics_ptr + 3 * tokens + token)
                                memory = (memory - mean) * inverse_std * scale + shift
                                memories = append(memories, memory)
                    for offset in tl.static_range(LOADED):
                        if start + offset < COLUMNS:
                            known = known_pixel(columns, inside, left + start + offset, width, WHOLE)
                            places = (prefix + (row - 1) * width + left + start + offset) * channels + columns
                            u = above[start + offset]
                            output = gate * u * _gelu(u, ACC)[0]
                            if PREVIOUS:
                                output += memories[offset]
                            result = loaded[offset].to(ACC) + factor * output
                            tl.store(output_ptr + places, output.to(output_ptr.dtype.element_ty), mask=known)
                            tl.store(sum_ptr + places, result.to(sum_ptr.dtype.element_ty), mask=known)
            above = add_row(here, normed, w10, w11, w12, COLUMNS)
            here = add_row(zeros_of_row(COLUMNS, CHANNELS, ACC), normed, w00, w01, w02, COLUMNS)


@triton.jit
def values_kernel(
    normed_ptr,  # [batch, tokens, channels]: n^
    grad_ptr,  # [batch, tokens, channels]: g
    next_ptr,  # [batch, height * width, channels]: gradient of O from the next layer
    weight_ptr,  # [channels, 9]
    gamma_ptr,  # [channels]
    beta_ptr,  # [channels]
    gate_ptr,  # [batch, heads]
    mask_ptr,  # [batch]
    grad_value_ptr,  # [batch, height * width, channels]: du
    grad_gate_ptr,  # [batch, segments, channels]: sums of dO GELU(u)
    prefix,
    height,
    width,
    channels,
    heads,
    segments,
    rows,
    NEXT: tl.constexpr,
    GATED: tl.constexpr,
    MASKED: tl.constexpr,
    WHOLE: tl.constexpr,
    LOADED: tl.constexpr,  # pixels that are loaded before any is stored
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
    normed_ptr += sample * tokens * channels
    grad_ptr += sample * tokens * channels
    next_ptr += (sample * pixels - prefix) * channels
    grad_value_ptr += (sample * pixels - prefix) * channels
    w00, w01, w02 = three_weights(weight_ptr, 0, columns, inside, ACC)
    w10, w11, w12 = three_weights(weight_ptr, 3, columns, inside, ACC)
    w20, w21, w22 = three_weights(weight_ptr, 6, columns, inside, ACC)
    gamma = tl.load(gamma_ptr + columns, mask=inside, other=0.0).to(ACC)
    beta = tl.load(beta_ptr + columns, mask=inside, other=0.0).to(ACC)
    gate = tl.full([CHANNELS], 1.0, ACC)
    if GATED:
        gate = tl.load(gate_ptr + sample * heads + columns // (channels // heads), mask=inside, other=0.0).to(ACC)
    factor = 1.0
    if MASKED:
        factor = tl.load(mask_ptr + sample).to(ACC)
    through_value = tl.zeros([CHANNELS], ACC)
    for left in range(0, width, COLUMNS):
        above = zeros_of_row(COLUMNS, CHANNELS, ACC)  # as in the forward pass
        here = zeros_of_row(COLUMNS, CHANNELS, ACC)
        for row in range(tl.maximum(first - 1, 0), last + 1):
            normed = load_row(
                normed_ptr, normed_ptr, row, left, columns, inside, gamma, beta, prefix, height, width, channels,
                WHOLE, COLUMNS, CHANNELS, ACC, NORMED=True,
            )  # fmt: skip
            above = add_row(above, normed, w20, w21, w22, COLUMNS)
            if row > first:
                for start in tl.static_range(0, COLUMNS, LOADED):
                    grads = ()  # as in the forward pass
                    for offset in tl.static_range(LOADED):
                        if start + offset < COLUMNS:
                            known = known_pixel(columns, inside, left + start + offset, width, WHOLE)
                            places = (prefix + (row - 1) * width + left + start + offset) * channels + columns
                            grad = factor * tl.load(grad_ptr + places, mask=known, other=0.0).to(ACC)
                            if NEXT:
                                grad += tl.load(next_ptr + places, mask=known, other=0.0).to(ACC)
                            grads = append(grads, grad)
                    for offset in tl.static_range(LOADED):
                        if start + offset < COLUMNS:
                            known = known_pixel(columns, inside, left + start + offset, width, WHOLE)
                            places = (prefix + (row - 1) * width + left + start + offset) * channels + columns
                            u = above[start + offset]
                            below, density = _gelu(u, ACC)
                            if GATED:
                                through_value += grads[offset] * u * below
                            value = gate * grads[offset] * (below + u * density)
                            tl.store(grad_value_ptr + places, value.to(grad_value_ptr.dtype.element_ty), mask=known)
            above = add_row(here, normed, w10, w11, w12, COLUMNS)
            here = add_row(zeros_of_row(COLUMNS, CHANNELS, ACC), normed, w00, w01, w02, COLUMNS)
    if GATED:
        tl.store(grad_gate_ptr + program.to(tl.int64) * channels + columns, through_value, mask=inside)


@triton.jit
def convolution_kernel(
    grad_value_ptr,  # [batch, height * width, channels]: du
    normed_ptr,  # [batch, tokens, channels]: n^
    weight_ptr,  # [channels, 9]
    gamma_ptr,  # [channels]
    beta_ptr,  # [channels]
    grad_normed_ptr,  # [batch, height * width, channels]: dn without dy
    products_ptr,  # [groups * segments, 9, channels]: of the 3x3 weight
    prefix,
    height,
    width,
    channels,
    batch,
    samples,
    segments,
    rows,
    STAGES: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    program, columns = program_and_channels(channels, CHANNELS)
    inside = columns < channels
    earliest = (program // segments) * samples
    first = (program % segments) * rows
    last = tl.minimum(first + rows, height)
    begin = tl.maximum(first - 1, 0)
    pixels = height * width
    tokens = prefix + pixels
    w00, w01, w02 = three_weights(weight_ptr, 0, columns, inside, ACC)
    w10, w11, w12 = three_weights(weight_ptr, 3, columns, inside, ACC)
    w20, w21, w22 = three_weights(weight_ptr, 6, columns, inside, ACC)
    gamma = tl.load(gamma_ptr + columns, mask=inside, other=0.0).to(ACC)
    beta = tl.load(beta_ptr + columns, mask=inside, other=0.0).to(ACC)
    p00 = tl.zeros([COLUMNS, CHANNELS], ACC)
    p01 = tl.zeros([COLUMNS, CHANNELS], ACC)
    p02 = tl.zeros([COLUMNS, CHANNELS], ACC)
    p10 = tl.zeros([COLUMNS, CHANNELS], ACC)
    p11 = tl.zeros([COLUMNS, CHANNELS], ACC)
    p12 = tl.zeros([COLUMNS, CHANNELS], ACC)
    p20 = tl.zeros([COLUMNS, CHANNELS], ACC)
    p21 = tl.zeros([COLUMNS, CHANNELS], ACC)
    p22 = tl.zeros([COLUMNS, CHANNELS], ACC)
    for index in range(tl.minimum(batch - earliest, samples)):
        sample = (earliest + index).to(tl.int64)
        normed_here = normed_ptr + sample * tokens * channels
        grad_value_here = grad_value_ptr + sample * pixels * channels
        grad_normed_here = grad_normed_ptr + sample * pixels * channels
        for left in range(0, width, COLUMNS):
            w = left + tl.arange(0, COLUMNS)
            across = (w < width)[:, None] & inside[None, :]
            from_left = ((w >= 1) & (w <= width))[:, None] & inside[None, :]
            from_right = (w < width - 1)[:, None] & inside[None, :]
            above = tl.zeros([COLUMNS, CHANNELS], ACC)  # dn of the row above, without the row below it
            here = tl.zeros([COLUMNS, CHANNELS], ACC)  # dn of this row, without the rows below
            n_above = tl.zeros([COLUMNS, CHANNELS], ACC)  # n of the row above, 0 outside of the program's rows
            n_here = _load_normed(
                normed_here, prefix + begin * width + w, (w < width) & (w * 0 + begin >= first), columns, inside, gamma,
                beta, channels, ACC,
            )  # fmt: skip
            for row in tl.range(begin, last + 1, num_stages=STAGES):
                exists = (w * 0 + row < height)[:, None]
                places = (row * width + w)[:, None] * channels + columns[None, :]
                c0 = tl.load(grad_value_here + places - channels, mask=from_left & exists, other=0.0).to(ACC)
                c1 = tl.load(grad_value_here + places, mask=across & exists, other=0.0).to(ACC)
                c2 = tl.load(grad_value_here + places + channels, mask=from_right & exists, other=0.0).to(ACC)
                n_below = _load_normed(
                    normed_here, prefix + (row + 1) * width + w, (w < width) & (w * 0 + row + 1 < last), columns,
                    inside, gamma, beta, channels, ACC,
                )  # fmt: skip
                # n at (i, j) entered u at (i + 1 - di, j + 1 - dj)
                above += w00[None, :] * c2 + w01[None, :] * c1 + w02[None, :] * c0
                ready = across & (w * 0 + row > first)[:, None]
                places -= width * channels
                tl.store(grad_normed_here + places, above.to(grad_normed_ptr.dtype.element_ty), mask=ready)
                above = here + w10[None, :] * c2 + w11[None, :] * c1 + w12[None, :] * c0
                here = w20[None, :] * c2 + w21[None, :] * c1 + w22[None, :] * c0
                p00 += n_above * c2
                p01 += n_above * c1
                p02 += n_above * c0
                p10 += n_here * c2
                p11 += n_here * c1
                p12 += n_here * c0
                p20 += n_below * c2
                p21 += n_below * c1
                p22 += n_below * c0
                n_above = n_here + 0.0
                n_here = n_below + 0.0
    store = products_ptr + program.to(tl.int64) * 9 * channels + columns
    tl.store(store, tl.sum(p00, 0), mask=inside)
    tl.store(store + channels, tl.sum(p01, 0), mask=inside)
    tl.store(store + 2 * channels, tl.sum(p02, 0), mask=inside)
    tl.store(store + 3 * channels, tl.sum(p10, 0), mask=inside)
    tl.store(store + 4 * channels, tl.sum(p11, 0), mask=inside)
    tl.store(store + 5 * channels, tl.sum(p12, 0), mask=inside)
    tl.store(store + 6 * channels, tl.sum(p20, 0), mask=inside)
    tl.store(store + 7 * channels, tl.sum(p21, 0), mask=inside)
    tl.store(store + 8 * channels, tl.sum(p22, 0), mask=inside)


@triton.jit
def norms_kernel(
    normed_ptr,  # [batch, tokens, channels]: n^
    previous_ptr,  # [batch, previous_tokens, channels]: O'
    grad_ptr,  # [batch, tokens, channels]: g
    next_ptr,  # [batch, pixels, channels]: gradient of O from the next layer
    grad_normed_ptr,  # [batch, pixels, channels]: dn without dy
    grad_pooled_ptr,  # [batch, channels]: gradient of each token of n through the average
    statistics_ptr,  # [batch, 4, tokens]
    gamma_ptr,  # [channels]
    previous_gamma_ptr,  # [channels]
    decay_ptr,  # [channels]
    mask_ptr,  # [batch]
    grad_x_ptr,  # [batch, tokens, channels]
    grad_previous_ptr,  # [batch, previous_tokens, channels]
    sums_ptr,  # [programs, 4, channels]: sums of dn n^ and dn, dO O'^ and dO
    rows,  # batch * tokens
    tokens,
    previous_tokens,
    prefix,
    channels,
    NEXT: tl.constexpr,
    GATED: tl.constexpr,
    PREVIOUS: tl.constexpr,
    DECAY: tl.constexpr,
    MASKED: tl.constexpr,
    ADD_PREFIX: tl.constexpr,
    STAGES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    columns = tl.arange(0, CHANNELS)
    inside = columns < channels
    pixels = tokens - prefix
    gamma = tl.load(gamma_ptr + columns, mask=inside, other=0.0).to(ACC)
    previous_gamma = tl.zeros([CHANNELS], ACC)
    if PREVIOUS:
        previous_gamma = tl.load(previous_gamma_ptr + columns, mask=inside, other=0.0).to(ACC)
        if DECAY:
            previous_gamma *= tl.load(decay_ptr + columns, mask=inside, other=0.0).to(ACC)
    grad_gamma = tl.zeros([TOKENS, CHANNELS], ACC)
    grad_beta = tl.zeros([TOKENS, CHANNELS], ACC)
    correlated = tl.zeros([TOKENS, CHANNELS], ACC)
    total = tl.zeros([TOKENS, CHANNELS], ACC)
    for start in tl.range(tl.program_id(0) * TOKENS, rows, tl.num_programs(0) * TOKENS, num_stages=STAGES):
        row = (start + tl.arange(0, TOKENS)).to(tl.int64)
        known = row < rows
        sample = row // tokens
        token = row % tokens
        patch = known & (token >= prefix)
        known_channels = known[:, None] & inside[None, :]
        patch_channels = patch[:, None] & inside[None, :]
        places = row[:, None] * channels + columns[None, :]
        pixel = (sample * pixels + token - prefix)[:, None] * channels + columns[None, :]
        grad = tl.load(grad_ptr + places, mask=known_channels, other=0.0).to(ACC)
        masked = grad
        if MASKED:
            masked = grad * tl.load(mask_ptr + sample, mask=known, other=0.0).to(ACC)[:, None]
        grad_normed = tl.load(grad_normed_ptr + pixel, mask=patch_channels, other=0.0).to(ACC)
        if GATED:
            average = sample[:, None] * channels + columns[None, :]
            grad_normed += tl.load(grad_pooled_ptr + average, mask=patch_channels, other=0.0)
        if ADD_PREFIX:
            grad_normed += tl.where(patch[:, None], 0.0, masked)
        normed = tl.load(normed_ptr + places, mask=known_channels, other=0.0).to(ACC)
        statistics = sample * 4 * tokens + token
        inverse_std = tl.load(statistics_ptr + statistics + tokens, mask=known, other=0.0)
        grad_gamma += grad_normed * normed
        grad_beta += grad_normed
        grad_x = grad + input_gradient(grad_normed * gamma[None, :], normed, inverse_std, channels)
        tl.store(grad_x_ptr + places, grad_x.to(grad_x_ptr.dtype.element_ty), mask=known_channels)
        if PREVIOUS:
            grad_output = tl.where(patch[:, None], masked, 0.0)
            if NEXT:
                grad_output += tl.load(next_ptr + pixel, mask=patch_channels, other=0.0).to(ACC)
            there = token + previous_tokens - tokens
            places = (sample * previous_tokens + there)[:, None] * channels + columns[None, :]
            previous = tl.load(previous_ptr + places, mask=patch_channels, other=0.0).to(ACC)
            mean = tl.load(statistics_ptr + statistics + 2 * tokens, mask=patch, other=0.0)
            inverse_std = tl.load(statistics_ptr + statistics + 3 * tokens, mask=patch, other=0.0)
            normed = tl.where(inside[None, :], (previous - mean[:, None]) * inverse_std[:, None], 0.0)
            correlated += grad_output * normed
            total += grad_output
            grad_previous = input_gradient(grad_output * previous_gamma[None, :], normed, inverse_std, channels)
            # prefix tokens of O', if there are any, have a gradient of zero
            stored = (known & (there >= 0))[:, None] & inside[None, :]
            tl.store(grad_previous_ptr + places, grad_previous.to(grad_previous_ptr.dtype.element_ty), mask=stored)
    store = sums_ptr + tl.program_id(0).to(tl.int64) * 4 * channels + columns
    tl.store(store, tl.sum(grad_gamma, 0), mask=inside)
    tl.store(store + channels, tl.sum(grad_beta, 0), mask=inside)
    tl.store(store + 2 * channels, tl.sum(correlated, 0), mask=inside)
    tl.store(store + 3 * channels, tl.sum(total, 0), mask=inside)


@triton.jit
def sums_kernel(
    products_ptr,  # [splits, 9, channels]: of the 3x3 weight
    norms_ptr,  # [programs, 4, channels]: see `norms_kernel`
    projections_ptr,  # [projection_splits, 2 * size]: of the weights of q and k
    previous_gamma_ptr,  # [channels]
    previous_beta_ptr,  # [channels]
    decay_ptr,  # [channels]
    value_ptr,  # [channels, 9]: gradient of the 3x3 weight
    grads_ptr,  # [5, channels]: gradients of gamma, beta, gamma', beta' and lambda
    grad_projections_ptr,  # [2 * size]
    channels,
    splits,
    programs,
    projection_splits,
    sizes,  # 2 * size
    PREVIOUS: tl.constexpr,
    DECAY: tl.constexpr,
    SPLITS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    kind = tl.program_id(0)
    columns = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = columns < channels
    if kind < 9:
        product = sum_of_splits(products_ptr, kind, columns, inside, channels, splits, 9, SPLITS, CHANNELS, ACC)
        tl.store(value_ptr + columns * 9 + kind, product, mask=inside)
    elif kind < 11:
        norm = sum_of_splits(norms_ptr, kind - 9, columns, inside, channels, programs, 4, SPLITS, CHANNELS, ACC)
        tl.store(grads_ptr + (kind - 9) * channels + columns, norm, mask=inside)
    elif kind == 11:
        inside = columns < sizes
        weight = sum_of_splits(projections_ptr, 0, columns, inside, sizes, projection_splits, 1, SPLITS, CHANNELS, ACC)
        tl.store(grad_projections_ptr + columns, weight, mask=inside)
    else:
        correlated = tl.zeros([CHANNELS], ACC)
        total = tl.zeros([CHANNELS], ACC)
        gamma = tl.load(previous_gamma_ptr + columns, mask=inside, other=0.0).to(ACC)
        beta = tl.load(previous_beta_ptr + columns, mask=inside, other=0.0).to(ACC)
        if PREVIOUS:
            correlated = sum_of_splits(norms_ptr, 2, columns, inside, channels, programs, 4, SPLITS, CHANNELS, ACC)
            total = sum_of_splits(norms_ptr, 3, columns, inside, channels, programs, 4, SPLITS, CHANNELS, ACC)
        decay = tl.full([CHANNELS], 1.0, ACC)
        if DECAY:
            decay = tl.load(decay_ptr + columns, mask=inside, other=0.0).to(ACC)
        tl.store(grads_ptr + 2 * channels + columns, correlated * decay, mask=inside)
        tl.store(grads_ptr + 3 * channels + columns, total * decay, mask=inside)
        tl.store(grads_ptr + 4 * channels + columns, correlated * gamma + total * beta, mask=inside)
