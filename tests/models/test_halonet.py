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
        {"centered": True, "downsampling": "pooling"},
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


def spatial(model):
    return {name.removesuffix(".spatial"): m for name, m in model.named_modules() if name.endswith(".spatial")}


@pytest.mark.parametrize(
    ("name", "depths", "block"),
    [
        ("halo_resnet50_b8", (3, 4, 6, 3), 8),
        ("halo_resnet50_b32", (3, 4, 6, 3), 32),
        ("halo_resnet101_b8", (3, 4, 23, 3), 8),
    ],
)
def test_the_backbones_of_detectors(name, depths, block):
    """Table 5: attention in the last three spatial layers, squeeze-and-excitation of 1/8 after the convolutions."""
    with torch.device("meta"):
        model = timm.create_model(name)
    layers = spatial(model)
    attention = {path: layer for path, layer in layers.items() if isinstance(layer, HaloAttention2d)}
    assert len(layers) == sum(depths)
    assert list(attention) == [f"stages.3.{number}" for number in range(3)]
    assert {(layer.block, layer.halo, layer.heads) for layer in attention.values()} == {(block, 3, 32)}
    assert [layer.stride for layer in attention.values()] == [2, 1, 1]
    for path in layers:
        se = model.get_submodule(path).se
        if path in attention:
            assert isinstance(se, torch.nn.Identity), "squeeze-and-excitation is for convolutions"
        else:
            assert se.fc1.in_channels == 8 * se.fc1.out_channels == model.get_submodule(path).norm2.num_features


def test_squeeze_and_excitation_follows_the_spatial_operation():
    block = small(conv_stages=(1, 2, 3, 4), se="conv").stages[0][0].eval()
    order = []
    for name in ("conv1", "spatial", "norm2", "se", "conv3"):
        getattr(block, name).register_forward_hook(lambda *_, name=name: order.append(name))
    block(torch.randn(1, 64, 8, 8))
    assert order == ["conv1", "spatial", "norm2", "se", "conv3"]


def test_a_detector_reads_the_maps_of_a_hybrid():
    model = timm.create_model("halo_resnet50_b8", features_only=True, depths=(1, 1, 1, 3)).eval()
    maps = model(torch.randn(1, 3, 64, 96))
    assert [tuple(m.shape[1:]) for m in maps] == [(256, 16, 24), (512, 8, 12), (1024, 4, 6), (2048, 2, 3)]


@pytest.mark.parametrize(("name", "stages"), [("c1", (1,)), ("c12", (1, 2)), ("c123", (1, 2, 3))])
def test_hybrids_of_h7(name, stages):
    """Table 4: convolutions with squeeze-and-excitation in the first stages, about 67 million parameters."""
    with torch.device("meta"):
        model = timm.create_model(f"halo_h7_{name}")
    for path, layer in spatial(model).items():
        convolves = int(path.split(".")[1]) + 1 in stages
        assert isinstance(layer, torch.nn.Conv2d) == convolves
        assert isinstance(model.get_submodule(path).se, torch.nn.Identity) != convolves
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(67.4, abs=0.5)


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
