"""Tests of local attention: which convolutions it replaces, and that they are restored."""

import copy

import pytest
import timm
import torch

import interlayer
from interlayer.mechanisms import HaloAttention2d


def attentions(model):
    return [name for name, module in model.named_modules() if isinstance(module, HaloAttention2d)]


def make(name="resnet26", **options):
    return interlayer.attach(timm.create_model(name, num_classes=5), "halo", image_size=64, **{"block": 4, **options})


def test_the_detection_backbone_replaces_the_last_three():
    """Section 4.6: the last three convolutions of ResNet-50 with SE."""
    model = make("resnet50_se", last=3, block=8)
    assert attentions(model) == ["layer4.0.conv2", "layer4.1.conv2", "layer4.2.conv2"]
    assert model.layer4[0].conv2.stride == 2
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)


def test_strided_layers_can_pool_as_in_sasa():
    model = timm.create_model("resnet26", num_classes=5, zero_init_last=False).eval()
    interlayer.attach(model, "halo", stages=(3, 4), block=4, centered=True, downsampling="pooling", image_size=64)
    layers = [m for m in model.modules() if isinstance(m, HaloAttention2d)]
    assert [(layer.stride, layer.downsampling) for layer in layers] == [(s, "pooling") for s in (2, 1, 2, 1)]
    image = torch.randn(1, 3, 72, 56)  # odd maps in between
    pooled = model(image)
    for layer in layers:
        layer.downsampling = "queries"
    assert not torch.allclose(model(image), pooled)


def test_blocks_of_any_size_can_pool():
    """Strided queries need a block divisible by the stride, pooling does not."""
    model = timm.create_model("resnet18", num_classes=5)
    with pytest.raises(ValueError, match="expected a block divisible by the stride 2"):
        interlayer.attach(model, "halo", stages=(4,), block=7)
    interlayer.attach(model, "halo", stages=(4,), block=7, downsampling="pooling")
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)
    assert "stride=2, downsampling='pooling'" in repr(model)


def test_convolutions_inside_augmented_ones_are_left_out():
    model = interlayer.attach(timm.create_model("resnet18", num_classes=5), "aa", stages=(3, 4))
    interlayer.attach(model, "halo", stages=(2,))
    names = [name for name, module in model.named_modules() if isinstance(module, HaloAttention2d)]
    assert names == [f"layer2.{block}.conv{conv}" for block in (0, 1) for conv in (1, 2)]
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)
    with pytest.raises(ValueError, match="stages"):
        interlayer.attach(interlayer.attach(timm.create_model("resnet18"), "aa", stages=(3, 4)), "halo", stages=(4,))


@pytest.mark.parametrize(("stages", "expected"), [(None, 8), ((4,), 2), ((2, 3), 4)])
def test_by_stage(stages, expected):
    model = make(stages=stages) if stages else make()
    assert len(attentions(model)) == expected
    model(torch.randn(2, 3, 64, 64)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_detached_and_loaded():
    plain = timm.create_model("resnet26", num_classes=5).eval()
    image = torch.randn(1, 3, 64, 64)
    logits, weights = plain(image), copy.deepcopy(plain.state_dict())
    model = interlayer.attach(plain, "halo", last=2, image_size=64)
    other = make(last=2)
    report = interlayer.load_backbone(other, weights)
    assert report.complete, report
    assert set(report.placed) == set(weights)
    torch.testing.assert_close(interlayer.detach(other).eval()(image), logits)
    interlayer.detach(model)
    torch.testing.assert_close(model(image), logits)
    assert list(model.state_dict()) == list(weights)


def test_it_composes():
    model = make(last=2)
    interlayer.attach(model, "rla", image_size=64)
    interlayer.attach(model, "mrla_light", image_size=64)
    model.train()(torch.randn(2, 3, 64, 64)).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    with pytest.raises(interlayer.AttachError, match="already has local attention"):
        interlayer.attach(model, "halo", image_size=64)
    interlayer.detach(model)
    assert list(model.state_dict()) == list(timm.create_model("resnet26", num_classes=5).state_dict())


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("resnet26", {"stages": (5,)}, "has stages 1 to 4, got stages"),
        ("resnet26", {"last": 9}, "expected last from 1 to 8"),
        ("resnet26", {"channels_per_head": 48}, "expected an even channels_per_head"),
        ("resnet26", {"block": 5}, "expected a block divisible by the stride 2 of"),
        ("vit_tiny_patch16_224", {}, "has no 3x3 convolutions"),
    ],
)
def test_what_cannot_be_is_refused(name, options, reason):
    model = timm.create_model(name, num_classes=5)
    before = list(model.state_dict())
    with pytest.raises(interlayer.AttachError, match=reason):
        interlayer.attach(model, "halo", **options)
    assert list(model.state_dict()) == before


@pytest.mark.parametrize("mechanism", ["se", "eca", "cbam", "gc", "bridge", "rla"])
def test_mechanisms_of_the_branch_behind_it(mechanism):
    """Mechanisms can be attached in any order: they read the channels from the replacement of a convolution."""
    model = interlayer.attach(make(stages=(4,)), mechanism, image_size=64)
    assert attentions(model) == ["layer4.0.conv2", "layer4.1.conv2"]
    assert model.eval()(torch.randn(1, 3, 64, 64)).shape == (1, 5)


def test_dilated_convolutions_are_not_left_out_in_silence():
    plain = timm.create_model("resnet26", output_stride=16)
    with pytest.raises(ValueError, match=r"layer4\.1\.conv2 of ResNet is dilated.*without output_stride"):
        interlayer.attach(plain, "halo", image_size=64)
    assert attentions(plain) == []


@pytest.mark.parametrize("options", [{"block": 8.0}, {"block": "8"}, {"halo": True}])
def test_sizes_are_whole_numbers(options):
    with pytest.raises(ValueError, match="must be a whole number"):
        make(**options)
