"""Tests of the measures of each layer of a network, against attention that is known."""

import math

import numpy as np
import pytest
import timm
import torch
from torch import nn

import interlayer
from interlayer import ops
from interlayer.analysis import (
    attention_distance,
    attention_entropy,
    attention_jacobian,
    attention_maps,
    broadcast_scales,
    capture,
    emsa_heads,
    head_similarity,
    relative_distance,
    row_entropy,
    scale_statistics,
)

IMAGES = torch.randn(5, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def vit(depth=2, **options):
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=depth, num_classes=5, **options).eval()


def uniform(model):
    """The network with queries of zero, whose attention is uniform."""
    for module in model.modules():
        if hasattr(module, "qkv"):
            nn.init.zeros_(module.qkv.weight)
            nn.init.zeros_(module.qkv.bias)
    return model


def test_entropy_of_uniform_attention_is_the_bound():
    for layer in attention_entropy(uniform(vit()), IMAGES):
        assert layer.bound == pytest.approx(math.log(17))
        for value in (layer.mean, layer.low, layer.high, layer.class_token):
            assert value == pytest.approx(layer.bound, rel=1e-5)
        assert (layer.heads, layer.images) == (3, 5)


def test_entropy_is_that_of_all_rows():
    """However images are divided into batches, statistics are those of the rows of all images."""
    model = vit()
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.mul_(20)  # attention that is not uniform
    entropies = row_entropy(attention_maps(model, IMAGES)[0].weights)  # [B, heads, queries]
    for images in (IMAGES, [IMAGES[:2], (IMAGES[2:], torch.zeros(3))]):
        layer = attention_entropy(model, images)[0]
        assert layer.mean == pytest.approx(float(entropies.mean()), rel=1e-5)
        assert layer.low == pytest.approx(float(entropies.quantile(0.15)), rel=1e-5)
        assert layer.high == pytest.approx(float(entropies.quantile(0.85)), rel=1e-5)
        assert layer.low < layer.mean < layer.high
        assert layer.class_token == pytest.approx(float(entropies[:, :, 0].mean()), rel=1e-5)
        assert layer.images == 5


def test_networks_without_a_class_token_have_no_entropy_of_it():
    swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=4, depths=(1, 1, 1, 1))
    layers = attention_entropy(swin, IMAGES[:1])
    assert [layer.class_token for layer in layers] == [None] * 4
    assert layers[0].bound == pytest.approx(math.log(16)), "the number of keys of a window"


def test_queries_that_pad_a_window_are_left_out():
    """A map of 10 x 10 pixels has 100 queries, its blocks of 4 x 4 pixels have 144."""
    layer = interlayer.mechanisms.HaloAttention2d(8, heads=2, block=4, halo=1, position="none")
    nn.init.zeros_(layer.query.weight)
    (found,) = attention_entropy(layer, torch.randn(1, 8, 10, 10))
    counts = [min(4 * b + 5, 10) - max(4 * b - 1, 0) for b in range(3)]  # keys of a block in one direction
    sizes = [4, 4, 2]  # queries
    expected = sum(m * n * math.log(counts[i] * counts[j]) for i, m in enumerate(sizes) for j, n in enumerate(sizes))
    assert found.mean == pytest.approx(expected / 100, rel=1e-5)


def test_distance_of_a_network_is_that_of_its_spatial_tokens():
    model = vit()
    each = attention_maps(model, IMAGES)[1]
    places = each.keys.positions()
    for per_query in (False, True):
        expected = relative_distance(each.weights[:, :, 1:, 1:], places, places, per_query=per_query)
        layer = attention_distance(model, [IMAGES[:2], IMAGES[2:]], per_query=per_query)[1]
        assert layer.mean == pytest.approx(float(expected.mean()), rel=1e-5)
        assert layer.heads_means == pytest.approx(expected.mean(0).tolist(), rel=1e-5)
    even = attention_distance(uniform(model), IMAGES)[1]
    assert even.mean == pytest.approx(even.uniform, rel=1e-5)


def test_distance_in_windows_is_that_of_attention_with_zeros_outside():
    """The same as scattering the weights of every query over the whole map, also with shifts and a halo."""
    torch.manual_seed(0)
    swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=4, depths=(2, 1, 1, 1))
    halo = interlayer.mechanisms.HaloAttention2d(8, heads=2, block=4, halo=1)
    for model, images, index in ((swin, IMAGES[:1], 1), (halo, torch.randn(1, 8, 10, 10), 0)):
        each = attention_maps(model, images)[index]
        height, width = each.queries.grid
        rows = [each.from_query((row, column)).flatten(2) for row in range(height) for column in range(width)]
        whole = torch.stack(rows, 2)
        places = each.keys.positions()
        for per_query in (False, True):
            expected = relative_distance(whole, places, places, per_query=per_query)
            layer = attention_distance(model, images, per_query=per_query)[index]
            assert layer.heads_means == pytest.approx(expected[0].tolist(), rel=1e-4)


def test_uniform_attention_does_not_reach_keys_that_are_masked():
    """Without queries, attention is uniform over the keys that a query may attend to: not to padding beside the map,
    nor to the other side of the image, with which the shifted windows of a Swin are filled.
    """
    halo = interlayer.mechanisms.HaloAttention2d(8, heads=2, block=4, halo=1, position="none")
    nn.init.zeros_(halo.query.weight)
    swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=4, depths=(2, 1, 1, 1))
    attention = swin.layers[0].blocks[1].attn
    assert swin.layers[0].blocks[1].shift_size == (2, 2)
    for parameter in (attention.qkv.weight, attention.qkv.bias, attention.relative_position_bias_table):
        nn.init.zeros_(parameter)
    for model, images, index in ((halo, torch.randn(1, 8, 10, 10), 0), (swin, IMAGES[:1], 1)):
        layer = attention_distance(model, images)[index]
        assert layer.mean == pytest.approx(layer.uniform, rel=1e-5)


def test_jacobian_and_entropy_are_of_the_same_rows():
    layers = attention_jacobian(vit(), IMAGES)
    even = attention_jacobian(uniform(vit()), IMAGES)
    assert all(layer.norm == pytest.approx(1 - 1 / 17, rel=1e-5) for layer in even)
    for layer in layers:
        assert layer.norm < 1 - 1 / 17
        assert len(layer.norms) == len(layer.entropies) == 5 * 3 * 17
        assert layer.norms.mean() == pytest.approx(layer.norm, rel=1e-5)
        assert (layer.norms <= 1 - np.exp(-layer.entropies) + 1e-5).all()


def test_scales_of_broadcasting_have_known_quantiles():
    scales = torch.linspace(0, 1, 101) * torch.tensor([1.0, -1.0]).repeat(51)[:101]  # |λ| is 0, 0.01 .. 1
    ratio, mean = scale_statistics(scales)
    assert ratio == pytest.approx(0.1 / 0.9)
    assert mean == pytest.approx(float(scales.mean()))
    model = interlayer.attach(vit(depth=4), "cb", scaled=True, image_size=64)
    before = broadcast_scales(model)
    assert [layer.name for layer in before] == ["blocks.2.mlp", "blocks.3.mlp"], "the upper half of the blocks"
    assert all(math.isnan(layer.ratio) and layer.mean == 0 for layer in before), "scales start at zero"
    nn.init.constant_(model.blocks[3].mlp.cb.scale, -0.5)
    after = broadcast_scales(model)[1]
    assert (after.ratio, after.mean, after.channels) == (1.0, -0.5, 192)
    for plain in (vit(), interlayer.attach(vit(depth=4), "cb", image_size=64)):
        with pytest.raises(ValueError, match="has no scaled context broadcasting: attach it as cb:scaled=true"):
            broadcast_scales(plain)


def test_heads_of_emsa_are_those_of_the_operation():
    torch.manual_seed(0)
    model = timm.create_model("rest_lite", depths=(1, 1, 1, 1), num_classes=5).eval()
    layers = emsa_heads(model, [IMAGES[:2], IMAGES[2:]])
    assert [layer.name for layer in layers] == ["stages.1.0.attn", "stages.2.0.attn", "stages.3.0.attn"]
    assert [len(layer.scores) for layer in layers] == [2, 4, 8], "the first stage has one head"
    attention = model.get_submodule("stages.2.0.attn")
    with torch.no_grad(), capture(model, ["stages.2.0.attn.q", "stages.2.0.attn.kv"]) as captured:
        model(IMAGES)
    q, kv = (values[0] for values in captured.values())
    maps = ops.mixed_attention_maps(
        q, kv[..., :256], attention.mix.weight.flatten(1), attention.mix.bias, heads=4, scale=attention.scale
    )
    for name in ("scores", "mixed", "normalized"):
        expected = head_similarity(getattr(maps, name).double())
        torch.testing.assert_close(getattr(layers[1], name), expected, atol=1e-5, rtol=1e-4)
    assert layers[1].images == 5
    with torch.no_grad():
        attention.mix.weight.fill_(0.25)  # all heads become the same
        attention.mix.bias.zero_()
    same = emsa_heads(model, IMAGES)[1]
    assert same.mean(same.mixed) == pytest.approx(1)
    assert same.mean(same.normalized) == pytest.approx(1)
    assert same.mean(same.scores) < 0.99
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(ValueError, match="has no EMSA of several heads"):
        emsa_heads(vit(), IMAGES)


def test_networks_without_attention_or_images_are_refused():
    with pytest.raises(ValueError, match="no spatial attention"):
        attention_entropy(timm.create_model("resnet10t", num_classes=5), IMAGES)
    with pytest.raises(ValueError, match="there are no images"):
        attention_entropy(vit(), [])
    with pytest.raises(ValueError, match=r"expected images \[B, C, H, W\]"):
        attention_entropy(vit(), IMAGES[0])
