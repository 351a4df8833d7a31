"""Kernels of the backward pass of a layer with MRLA-base. See `base_layer.py` for their order.

Let g be the gradient of x', 0 where a ReLU after the norm of O is, and G_s that of V_s from later layers. Then

    dO   = (m g - mean(m g) - O^ mean(m g O^)) scale        O^ = (O - mean) / std
    G'_s = G_s + p_s dO                                     the gradient of V_s, for all s <= t
    dp_s = sum over the pixels and channels of a head of dO V_s
    da_s = p_s (dp_s - sum over r of p_r dp_r) / sqrt(d)    the gradient of q · k_s
    dq   = sum over s of da_s k_s
    dk_s = da_s q + what later layers give

Neighboring channels of a head are folded: they share the weights p, and their products are added at once, so that a
program needs one register a thread for each p_s and dp_s.
"""

import triton
import triton.language as tl

from .light_layer_gradients import output_gradient
from .light_layer_parts import append
from .map_shape import SIZES

# Numbers that differ from layer to layer would otherwise be compiled anew for 1 and for multiples of 16.
VARYING = ["number", "first_layer", "layers", "given"]


@triton.jit
def folded_channels(channels, FOLDS: tl.constexpr, FOLD: tl.constexpr):
    """Returns the number of a program, its groups of channels, [FOLDS], and its channels, [FOLDS, FOLD]."""
    chunks = (channels + FOLDS * FOLD - 1) // (FOLDS * FOLD)
    folds = (tl.program_id(0) % chunks) * FOLDS + tl.arange(0, FOLDS)
    return tl.program_id(0) // chunks, folds, folds[:, None] * FOLD + tl.arange(0, FOLD)[None, :]


@triton.jit
def load_weights(
    weights_ptr, sample, folds, channels, heads, layers, first_layer, number,
    LAYERS: tl.constexpr, FOLD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Returns p_s of the channels of a program, [FOLDS] each, for a group of layers: 0 beyond their number."""
    head = folds * FOLD // (channels // heads)
    start = weights_ptr + (sample * heads + head) * layers + first_layer
    weights = ()
    for layer in tl.static_range(LAYERS):
        known = (folds * FOLD < channels) & (folds * 0 + layer < number)
        weights = append(weights, tl.load(start + layer, mask=known, other=0.0).to(ACC))
    return weights


@triton.jit
def masked_gradient(grad, output, scale, shift, ACTIVATION: tl.constexpr):
    """Returns g, which is 0 where the ReLU after the norm of O is."""
    if ACTIVATION:
        grad = tl.where(output * scale[None, :, :] + shift[None, :, :] <= 0, 0.0, grad)
    return grad


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SIZES)
def attended_kernel(
    grad_ptr,  # [batch, pixels, channels]: gradient of x'
    values,  # V_s of a group of layers, each [batch, pixels, channels]
    weights_ptr,  # [batch, heads, layers]: p
    table_ptr,  # [4, channels]: of the norm of O
    mask_ptr,  # [batch]
    output_ptr,  # [batch, pixels, channels]: O
    sums_ptr,  # [batch * segments, 2, channels]: sums of m g and of m g O^
    pixels,
    pixels_per_segment,
    segments,
    channels,
    heads,
    number,  # of layers of the group
    first_layer,
    layers,
    SUMS: tl.constexpr,  # O is complete: compute the sums
    MASKED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LAYERS: tl.constexpr,
    PIXELS: tl.constexpr,
    FOLDS: tl.constexpr,
    FOLD: tl.constexpr,
    ACC: tl.constexpr,
):
    """Adds p_s V_s of a group of layers to O, or starts O with it, and computes the sums of the norm's gradient."""
    program, folds, columns = folded_channels(channels, FOLDS, FOLD)
    inside = columns < channels
    sample = (program // segments).to(tl.int64)
    start = sample * pixels * channels
    first = (program % segments) * pixels_per_segment
    last = tl.minimum(first + pixels_per_segment, pixels)
    weights = load_weights(weights_ptr, sample, folds, channels, heads, layers, first_layer, number, LAYERS, FOLD, ACC)
    mean = tl.zeros([FOLDS, FOLD], ACC)
    scale = mean
    shift = mean
    if SUMS:
        mean = tl.load(table_ptr + columns, mask=inside, other=0.0)
        scale = tl.load(table_ptr + 2 * channels + columns, mask=inside, other=0.0)
        shift = tl.load(table_ptr + 3 * channels + columns, mask=inside, other=0.0)
    total = tl.zeros([PIXELS, FOLDS, FOLD], ACC)
    correlated = tl.zeros([PIXELS, FOLDS, FOLD], ACC)
    for pixel in range(first, last, PIXELS):
        lines = pixel + tl.arange(0, PIXELS)
        here = (lines < last)[:, None, None] & inside[None, :, :]
        places = start + lines[:, None, None] * channels + columns[None, :, :]
        begun = here & (lines * 0 + first_layer > 0)[:, None, None]
        output = tl.load(output_ptr + places, mask=begun, other=0.0).to(ACC)
        grad = output
        if SUMS:
            grad = tl.load(grad_ptr + places, mask=here, other=0.0).to(ACC)
        for layer in tl.static_range(LAYERS):
            there = here & (lines * 0 + layer < number)[:, None, None]
            value = tl.load(values[layer] + places, mask=there, other=0.0).to(ACC)
            output += weights[layer][None, :, None] * value
        stored = output.to(output_ptr.dtype.element_ty)
        tl.store(output_ptr + places, stored, mask=here)
        if SUMS:
            output = stored.to(ACC)  # as it is read again, so that the ReLU is 0 at the same pixels
            grad = masked_gradient(grad, output, scale, shift, ACTIVATION)
            total += grad
            correlated += grad * (output - mean[None, :, :])
    if SUMS:
        factor = 1.0
        if MASKED:
            factor = tl.load(mask_ptr + sample).to(ACC)
        inverse_std = tl.load(table_ptr + channels + columns, mask=inside, other=0.0)
        store = sums_ptr + program.to(tl.int64) * 2 * channels + columns
        tl.store(store, tl.sum(total, 0) * factor, mask=inside)
        tl.store(store + channels, tl.sum(correlated, 0) * inverse_std * factor, mask=inside)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SIZES)
def values_kernel(
    grad_ptr,  # [batch, pixels, channels]: gradient of x'
    output_ptr,  # [batch, pixels, channels]: O
    values,  # V_s of a group of layers, each [batch, pixels, channels]
    grads,  # G_s, each [batch, pixels, channels]
    results,  # G'_s, each [batch, pixels, channels]; may be the same tensors
    weights_ptr,  # [batch, heads, layers]: p
    table_ptr,  # [4, channels]: of the norm of O
    norm_sums_ptr,  # [2, channels]: sums of m g and of m g O^
    mask_ptr,  # [batch]
    products_ptr,  # [batch * segments, layers, channels / FOLD]: sums of dO V_s
    pixels,
    pixels_per_segment,
    segments,
    channels,
    heads,
    count,  # pixels of the batch
    number,  # of layers of the group
    first_layer,
    layers,
    given,  # bit s: whether G_s is given
    prefix,  # tokens of a sample before its pixels in the gradient of x'
    NORM: tl.constexpr,  # False if O is not normalized: dO = m g
    MASKED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TRAINING: tl.constexpr,
    LAYERS: tl.constexpr,
    CHUNK: tl.constexpr,  # layers that are loaded before any result is stored, so that their loads overlap
    PIXELS: tl.constexpr,
    FOLDS: tl.constexpr,
    FOLD: tl.constexpr,
    ACC: tl.constexpr,
):
    """Computes G'_s = G_s + p_s dO and the sums of dO V_s for a group of layers."""
    program, folds, columns = folded_channels(channels, FOLDS, FOLD)
    inside = columns < channels
    sample = (program // segments).to(tl.int64)
    start = sample * pixels * channels
    grad_ptr += (sample + 1) * prefix * channels
    first = (program % segments) * pixels_per_segment
    last = tl.minimum(first + pixels_per_segment, pixels)
    weights = load_weights(weights_ptr, sample, folds, channels, heads, layers, first_layer, number, LAYERS, FOLD, ACC)
    scale = tl.zeros(columns.shape, ACC)
    shift = scale
    factor = scale + 1.0
    slope = scale
    constant = scale
    if NORM:
        scale = tl.load(table_ptr + 2 * channels + columns, mask=inside, other=0.0)
        shift = tl.load(table_ptr + 3 * channels + columns, mask=inside, other=0.0)
        factor, slope, constant = output_gradient(
            norm_sums_ptr, table_ptr, mask_ptr, sample, columns, inside, channels, count, MASKED, TRAINING, ACC
        )
    elif MASKED:
        factor *= tl.load(mask_ptr + sample).to(ACC)
    products = ()
    for _ in tl.static_range(LAYERS):
        products = append(products, tl.zeros([PIXELS, FOLDS], ACC))
    for pixel in range(first, last, PIXELS):
        lines = pixel + tl.arange(0, PIXELS)
        here = (lines < last)[:, None, None] & inside[None, :, :]
        places = start + lines[:, None, None] * channels + columns[None, :, :]
        grad = tl.load(grad_ptr + places, mask=here, other=0.0).to(ACC)
        if NORM:
            output = tl.load(output_ptr + places, mask=here, other=0.0).to(ACC)
            grad = masked_gradient(grad, output, scale, shift, ACTIVATION)
            grad = grad * factor[None, :, :] + output * slope[None, :, :] + constant[None, :, :]
        else:
            grad *= factor[None, :, :]
        added = ()
        for start_of_chunk in tl.static_range(0, LAYERS, CHUNK):
            chunk = ()
            received = ()
            for layer in tl.static_range(start_of_chunk, start_of_chunk + CHUNK):
                there = here & (lines * 0 + layer < number)[:, None, None]
                known = there & (lines * 0 + ((given >> layer) & 1) > 0)[:, None, None]
                chunk = append(chunk, tl.load(values[layer] + places, mask=there, other=0.0))
                received = append(received, tl.load(grads[layer] + places, mask=known, other=0.0))
            for layer in tl.static_range(start_of_chunk, start_of_chunk + CHUNK):
                there = here & (lines * 0 + layer < number)[:, None, None]
                added = append(added, products[layer] + tl.sum(grad * chunk[layer - start_of_chunk].to(ACC), 2))
                result = received[layer - start_of_chunk].to(ACC) + weights[layer][None, :, None] * grad
                tl.store(results[layer] + places, result.to(results[layer].dtype.element_ty), mask=there)
        products = added
    store = products_ptr + (program.to(tl.int64) * layers + first_layer) * (channels // FOLD) + folds
    for layer in tl.static_range(LAYERS):
        within = (folds * FOLD < channels) & (folds * 0 + layer < number)
        tl.store(store + layer * (channels // FOLD), tl.sum(products[layer], 0), mask=within)


@triton.jit
def weight_gradient(
    products_ptr, grad_weights_ptr, sample, layer, head, channels, segments, heads, layers,
    RETURNED: tl.constexpr, HEADS: tl.constexpr, FOLDS: tl.constexpr, FOLD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Returns dp of one layer and sample, [HEADS]."""
    folds = channels // heads // FOLD  # of a head
    fold = tl.arange(0, FOLDS)
    inside = (head < heads)[:, None] & (fold < folds)[None, :]
    total = tl.zeros([HEADS, FOLDS], ACC)
    for segment in range(segments):
        start = products_ptr + ((sample * segments + segment) * layers + layer) * (channels // FOLD)
        total += tl.load(start + head[:, None] * folds + fold[None, :], mask=inside, other=0.0)
    grad = tl.sum(total, 1)
    if RETURNED:
        place = (sample * heads + head) * layers + layer
        grad += tl.load(grad_weights_ptr + place, mask=head < heads, other=0.0).to(ACC)
    return grad


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SIZES)
def keys_kernel(
    products_ptr,  # [batch, segments, layers, channels / FOLD]: sums of dO V_s
    weights_ptr,  # [batch, heads, layers]: p
    grad_weights_ptr,  # [batch, heads, layers]: gradient of the weights that the layer returns
    query_ptr,  # [batch, channels]
    keys,  # of a group of layers, each [batch, channels]
    grads,  # gradients of the keys from later layers, each [batch, channels]
    results,  # gradients of the keys, each [batch, channels]; may be the same tensors
    grad_query_ptr,  # [batch, channels]
    channels,
    segments,
    heads,
    score_scale,
    number,  # of layers of the group
    first_layer,
    layers,
    given,  # bit s: whether the gradient of k_s is given
    RETURNED: tl.constexpr,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    DEPTH: tl.constexpr,  # channels of a head
    FOLDS: tl.constexpr,
    FOLD: tl.constexpr,
    ACC: tl.constexpr,
):
    """Computes dk_s of a group of layers, and adds their part to dq."""
    sample = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    depth = channels // heads
    within = tl.arange(0, DEPTH)
    inside = (head < heads)[:, None] & (within < depth)[None, :]
    places = sample * channels + head[:, None] * depth + within[None, :]
    start = weights_ptr + (sample * heads + head) * layers
    average = tl.zeros([HEADS], ACC)
    for layer in range(layers):
        grad = weight_gradient(
            products_ptr, grad_weights_ptr, sample, layer, head, channels, segments, heads, layers,
            RETURNED, HEADS, FOLDS, FOLD, ACC,
        )  # fmt: skip
        average += grad * tl.load(start + layer, mask=head < heads, other=0.0).to(ACC)
    query = tl.load(query_ptr + places, mask=inside, other=0.0)
    begun = inside & (places * 0 + first_layer > 0)
    grad_query = tl.load(grad_query_ptr + places, mask=begun, other=0.0)
    for index in tl.static_range(LAYERS):
        known = (head < heads) & (head * 0 + index < number)
        weight = tl.load(start + first_layer + index, mask=known, other=0.0).to(ACC)
        grad = weight_gradient(
            products_ptr, grad_weights_ptr, sample, tl.minimum(first_layer + index, layers - 1), head, channels,
            segments, heads, layers, RETURNED, HEADS, FOLDS, FOLD, ACC,
        )  # fmt: skip
        score = weight * (grad - average) * score_scale
        there = inside & known[:, None]
        grad_query += score[:, None] * tl.load(keys[index] + places, mask=there, other=0.0).to(ACC)
        arrived = there & (places * 0 + ((given >> index) & 1) > 0)
        grad_key = tl.load(grads[index] + places, mask=arrived, other=0.0).to(ACC) + score[:, None] * query
        tl.store(results[index] + places, grad_key.to(results[index].dtype.element_ty), mask=there)
    tl.store(grad_query_ptr + places, grad_query, mask=inside)


@triton.jit(do_not_specialize_on_alignment=SIZES)
def projections_kernel(
    pooled_ptr,  # [batch, segments, channels]: sums of x
    query_ptr,  # [size]: weight of the Conv1d for q
    key_ptr,  # [size]
    grad_query_ptr,  # [batch, channels]: dq
    grad_key_ptr,  # [batch, channels]: dk of this layer
    grad_pooled_ptr,  # [batch, channels]: gradient of each pixel of x through the average
    grad_weights_ptr,  # [batch, chunks, 2, size]: gradients of the weights of q and k
    channels,
    segments,
    size,
    pixels,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Computes the gradients of the average and of the weights of q and k."""
    sample = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = columns < channels
    average = tl.zeros([CHANNELS], ACC)
    for segment in range(segments):
        start = pooled_ptr + (sample * segments + segment) * channels
        average += tl.load(start + columns, mask=inside, other=0.0)
    average = average / pixels
    store = grad_weights_ptr + (sample * tl.num_programs(1) + tl.program_id(1)) * 2 * size
    grad = tl.zeros([CHANNELS], ACC)
    for offset in range(size):
        # channel c entered q at the channel c - offset + size // 2
        there = columns - offset + size // 2
        known = inside & (there >= 0) & (there < channels)
        grad_query = tl.load(grad_query_ptr + sample * channels + there, mask=known, other=0.0)
        grad_key = tl.load(grad_key_ptr + sample * channels + there, mask=known, other=0.0).to(ACC)
        grad += grad_query * tl.load(query_ptr + offset).to(ACC) + grad_key * tl.load(key_ptr + offset).to(ACC)
        tl.store(store + offset, tl.sum(grad_query * average, 0))
        tl.store(store + size + offset, tl.sum(grad_key * average, 0))
    tl.store(grad_pooled_ptr + sample * channels + columns, grad / pixels, mask=inside)
