"""Tests of ResT: the interface of timm, EMSA and plain attention, and published names."""

import re

import pytest
import timm
import torch
from torch import nn

import interlayer
from interlayer.mechanisms import EfficientAttention, PixelAttention
from interlayer.models.networks.rest import MODELS, ResT

SMALL = {"dims": (8, 16, 32, 64), "depths": (1, 2, 1, 1), "num_classes": 5}


def small(**options):
    return ResT(**{**SMALL, **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention": "msa"},
        {"position_kernel": 1},
        {"drop_path_rate": 0.3, "proj_drop_rate": 0.1, "drop_rate": 0.1},
    ],
)
def test_every_option_builds_and_trains(options):
    """Any height and width works, and every parameter has a gradient, which is zero for the bias of the mixing."""
    model = small(**options)
    output = model(torch.randn(2, 3, 70, 64))
    assert output.shape == (2, 5)
    output.square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_timms_interface():
    model = timm.create_model("rest_lite", depths=(1, 1, 1, 1), num_classes=3).eval()
    image = torch.randn(1, 3, 96, 64)
    torch.testing.assert_close(model.forward_head(model.forward_features(image)), model(image))
    only = timm.create_model("rest_small", features_only=True, depths=(1, 1, 1, 1))
    assert [tuple(f.shape[1:]) for f in only(image)] == [(64, 24, 16), (128, 12, 8), (256, 6, 4), (512, 3, 2)]
    assert [only.feature_info.reduction(), only.feature_info.channels()] == [[4, 8, 16, 32], [64, 128, 256, 512]]


def test_features_for_detectors_are_normalised():
    """Appendix A.3, Table 2: a LayerNorm follows each stage, which the classifier does not use."""
    plain, normed = small().eval(), small(out_norms=True).eval()
    normed.load_state_dict(plain.state_dict(), strict=False)
    image = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(normed(image), plain(image))
    before, after = (m.forward_intermediates(image, intermediates_only=True) for m in (plain, normed))
    for x, y in zip(before, after, strict=True):
        expected = nn.functional.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2]).permute(0, 3, 1, 2)
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("backend", ["reference", "affine"])
@pytest.mark.parametrize(("heads", "reduction"), [(1, 2), (4, 2), (2, 1)])
def test_the_attention_written_out(backend, heads, reduction):
    """EMSA from tokens to tokens equals the computation of the authors' program, in float64."""
    layer = EfficientAttention(16, heads, reduction=reduction).double()
    x, grid = torch.randn(2, 48, 16, dtype=torch.float64), (6, 8)
    source = x
    if reduction > 1:
        source = layer.shrink(x.permute(0, 2, 1).reshape(2, 16, 6, 8)).reshape(2, 16, -1).permute(0, 2, 1)
        source = layer.norm(source)
    q = layer.q(x).reshape(2, 48, heads, -1).permute(0, 2, 1, 3)
    k, v = layer.kv(source).reshape(2, -1, 2, heads, 16 // heads).permute(2, 0, 3, 1, 4)
    weights = q @ k.transpose(-2, -1) * (16 // heads) ** -0.5
    if heads > 1:
        weights = layer.mix(weights)
    weights = weights.softmax(-1)
    if heads > 1:
        weights = nn.InstanceNorm2d(heads)(weights)
    expected = layer.proj((weights @ v).transpose(1, 2).reshape(2, 48, 16))
    with interlayer.backend(backend):
        torch.testing.assert_close(layer(x, grid), expected)


def test_the_group_linear_layer_is_a_depthwise_convolution():
    """It equals Eq. 2 and 3 of appendix A.4 with one group per channel."""
    layer = PixelAttention(6, kernel_size=1)
    x = torch.randn(2, 6, 3, 4)
    groups = [
        part * weight + bias
        for part, weight, bias in zip(x.split(1, 1), layer.conv.weight, layer.conv.bias, strict=True)
    ]
    torch.testing.assert_close(layer(x), x * torch.cat(groups, 1).sigmoid())


def published_names(state_dict):
    """Renames tensors as in the authors' program, independently of the conversion."""
    renamed = {}
    for name, tensor in state_dict.items():
        parts = name.split(".")
        if parts[0] == "stem":
            which = {"0": "conv1", "1": "norm1", "3": "conv2", "4": "norm2", "6": "conv3"}[parts[1]]
            name = ".".join(("stem", which, *parts[2:]))
        elif parts[0] == "stages":
            stage, part, rest = int(parts[1]) + 1, parts[2], ".".join(parts[3:])
            if part == "embed":
                opened = "stem" if stage == 1 else f"patch_embed_{stage}"
                name = f"{opened}.{rest.replace('position.conv', 'pos.pa_conv')}"
            else:
                rest = re.sub(r"attn\.norm\.", "attn.sr_norm.", rest).replace("attn.shrink.", "attn.sr.")
                name = f"stage{stage}.{part}.{rest.replace('attn.mix.', 'attn.transform_conv.')}"
        renamed[name] = tensor
    return renamed


@pytest.mark.parametrize("name", MODELS)
def test_published_names_convert(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    published = published_names(model.state_dict())
    assert {"patch_embed_4.pos.pa_conv.weight", "stage2.1.attn.transform_conv.bias"} <= set(published)
    converted = interlayer.convert_checkpoint(published, model)
    assert {key: value.shape for key, value in converted.items()} == {k: v.shape for k, v in model.state_dict().items()}


def test_mechanisms_attach():
    """Layer attention follows the blocks, and context broadcasting is in their MLPs."""
    model = interlayer.attach(small(depths=(2, 2, 2, 2)), "mrla_light", image_size=64)
    model = interlayer.attach(model, "cb", image_size=64)
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_features_of_the_first_stages_have_no_idle_parameters():
    """DDP raises an error for parameters without a gradient."""
    only = timm.create_model(
        "rest_lite", features_only=True, out_indices=(0, 1), out_norms=True, depths=(1, 1, 1, 1)
    )  # fmt: skip
    sum(f.square().sum() for f in only(torch.randn(1, 3, 64, 64))).backward()
    assert [name for name, p in only.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention": "linear"}, "attention must be 'emsa' or 'msa'"),
        ({"depths": (2, 2)}, "one for each stage"),
        ({"heads": (1, 2)}, "one for each stage"),
        ({"position_kernel": 2}, "must be odd"),
        ({"heads": (0, 2, 4, 8)}, "divisible by heads, at least 1"),
        ({"reductions": (0, 4, 2, 1)}, "reduction must be a whole number of at least 1"),
    ],
)
def test_bad_options_are_named(options, reason):
    with pytest.raises(ValueError, match=reason):
        small(**options)


def test_tokens_must_fill_their_map():
    with pytest.raises(ValueError, match="expected the tokens of a map of 3 x 4 pixels, got 10"):
        EfficientAttention(16, 2)(torch.randn(1, 10, 16), (3, 4))


def test_it_compiles_and_exports():
    model, image = small().eval(), torch.randn(2, 3, 64, 64)
    expected = model(image)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(image), expected)
    torch.testing.assert_close(torch.export.export(model, (image,)).module()(image), expected)
