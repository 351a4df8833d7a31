"""Tests of HaloNet: the interface of timm, hybrids with convolutions, and attached mechanisms."""

import pytest
import timm
import torch
from timm.layers import DropPath

import interlayer
from interlayer.mechanisms import HaloAttention2d, resize_halo
from interlayer.models.networks.halonet import HaloNet

SMALL = {"depths": (1, 1, 1, 1), "block": 4, "halo": 1, "img_size": 64, "num_classes": 5}


def small(**options):
    return HaloNet(**{**SMALL, **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stem": "patch"},
        {"conv_stages": (1, 2), "se": "conv"},
        {"se": True, "act_layer": "relu"},
        {"r_v": 2.0, "r_b": 3.0, "r_qk": 0.5, "r_w": 0.5, "final_width": 96},
        {"centered": True},
        {"position": "absolute"},
        {"drop_path_rate": 0.3},
    ],
)
def test_every_option_builds_and_trains(options):
    model = small(**options)
    output = model(torch.randn(2, 3, 64, 64))
    assert output.shape == (2, 5)
    output.square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    convolved = [
        name for name, m in model.named_modules() if name.endswith(".spatial") and not isinstance(m, HaloAttention2d)
    ]
    assert len(convolved) == len(options.get("conv_stages", ()))
    rates = [m.drop_prob for m in model.modules() if isinstance(m, DropPath)]
    assert rates == pytest.approx([0.1, 0.2, 0.3] if "drop_path_rate" in options else [])


def test_timms_interface():
    model = timm.create_model("halo_h0", num_classes=3, depths=(1, 1, 1, 1)).eval()
    image = torch.randn(1, 3, 96, 75)
    features = model.forward_features(image)
    assert features.shape[1] == model.num_features
    torch.testing.assert_close(model.forward_head(features), model(image))
    only = timm.create_model("halo_h1", features_only=True, depths=(1, 1, 1, 1))
    assert [tuple(f.shape[1:]) for f in only(image)] == [(64, 24, 19), (128, 12, 10), (256, 6, 5), (512, 3, 3)]
    assert timm.get_pretrained_cfg("halo_h7").input_size == (3, 600, 600)
    assert "stages.0.0.spatial.rel_rows" in model.no_weight_decay()


def test_layer_attention_attaches():
    model = interlayer.attach(small(depths=(2, 2, 2, 2)), "mrla_light", image_size=64)
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_a_trained_network_takes_another_block_and_image():
    """Appendix E: relative positions are interpolated for fine-tuning with another image and block size."""
    model = small().eval()
    image = torch.randn(1, 3, 64, 64)
    expected = model(image)
    torch.testing.assert_close(resize_halo(model, block=4, halo=1)(image), expected)
    assert resize_halo(model, block=6, halo=2)(torch.randn(1, 3, 96, 96)).shape == (1, 5)


@pytest.mark.parametrize(
    ("options", "reason"), [({"stem": "pool"}, "stem must be"), ({"act_layer": "abs"}, "activation")]
)
def test_unknown_options_are_named(options, reason):
    with pytest.raises(ValueError, match=reason):
        small(**options)


def test_it_compiles_and_exports():
    model, image = small().eval(), torch.randn(1, 3, 64, 64)
    expected = model(image)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(image), expected)
    torch.testing.assert_close(torch.export.export(model, (image,)).module()(image), expected)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"se": "none"}, "se must be True, False or 'conv', got 'none'"),
        ({"conv_stages": (5,)}, "conv_stages must be some of the stages 1 to 4"),
        ({"conv_stages": 1}, "conv_stages must be some of the stages 1 to 4"),
        ({"r_v": 0}, "r_v must be a number above 0, got 0"),
        ({"r_b": -1}, "r_b must be a number above 0"),
        ({"r_w": "2"}, "r_w must be a number above 0, got '2'"),
        ({"block": 8.0}, "block must be a whole number"),
    ],
)
def test_options_that_cannot_be_are_named(options, reason):
    with pytest.raises(ValueError, match=reason):
        timm.create_model("halo_h0", **options)
