"""Options that make controls of mechanisms: what is left when other layers are not read, computed in another way."""

import io

import pytest
import timm
import torch
import torch.nn.functional as F
from layer_stages import STYLES, VARIANTS, run_stage, stage
from timm.models.resnet import Bottleneck, ResNet

import interlayer
from interlayer.mechanisms import MLA, MRLABase, MRLALight
from interlayer.mechanisms.dia import DIA

MAPS = torch.randn(3, 2, 16, 5, 4, generator=torch.Generator().manual_seed(0))


def seeded_stage(make, seed=0, **options):
    torch.manual_seed(seed)
    return stage(make, **options)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_alone_has_the_same_parameters_and_reads_no_other(variant, style):
    """Otherwise a difference to the mechanism could come from other initial values, or not from other layers."""
    whole = seeded_stage(VARIANTS[variant], style=style).eval()
    alone = seeded_stage(VARIANTS[variant], style=style, cross_layer=False).eval()
    saved, ours = whole.state_dict(), alone.state_dict()
    assert list(saved) == list(ours)
    assert all(torch.equal(saved[name], ours[name]) for name in saved)
    changed = torch.cat((MAPS[:2].flip(0, 2), MAPS[2:]))
    assert torch.equal(run_stage(alone, MAPS)[2], run_stage(alone, changed)[2])
    assert not torch.allclose(run_stage(whole, MAPS)[2], run_stage(whole, changed)[2])
    for layer, x in zip(alone, MAPS, strict=True):
        torch.testing.assert_close(run_stage(alone, MAPS)[list(alone).index(layer)], layer(x)[0])
    assert {layer.memory_scope for layer in alone} == {"none"}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_of_a_control_gets_a_gradient(variant, style):
    """DDP expects one, also for lambda, queries and keys that are multiplied by zero."""
    for options in ({"cross_layer": False}, {"attention": False}):
        layers = seeded_stage(VARIANTS[variant], style=style, **options)
        sum(output.square().sum() for output in run_stage(layers, MAPS)).backward()
        assert [name for name, p in layers.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("reading", ["paper", "published"])
@pytest.mark.parametrize("style", STYLES)
def test_light_alone_computes_what_it_computes_without_memory(style, reading):
    alone = seeded_stage(MRLALight, style=style, cross_layer=False, reading=reading).eval()
    without = seeded_stage(MRLALight, style=style, memory=False, reading=reading).eval()
    without.load_state_dict({k: v for k, v in dict(alone.state_dict()).items() if k in without.state_dict()})
    for ours, theirs in zip(run_stage(alone, MAPS, MAPS), run_stage(without, MAPS, MAPS), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("options", [{"cross_layer": False}, {"attention": False}])
@pytest.mark.parametrize("variant", ["base", "mla", "linear"])
def test_the_softmax_of_a_single_layer_leaves_the_convolution_and_the_norm(variant, options):
    cnn, transformer = (seeded_stage(VARIANTS[variant], style=style, **options).eval()[0] for style in STYLES)
    x = MAPS[0]
    with torch.no_grad():
        cnn.norm.running_mean.uniform_(-1, 1)
        transformer.norm_in.weight.uniform_(0, 1)
    expected = x + cnn.norm(F.conv2d(x, cnn.value.weight, padding=1, groups=16))
    torch.testing.assert_close(cnn(x)[0], expected, rtol=1e-5, atol=1e-5)
    normed = transformer.norm_in(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    expected = x + F.conv2d(normed, transformer.value.weight, padding=1, groups=16)
    torch.testing.assert_close(transformer(x)[0], expected, rtol=1e-5, atol=1e-5)


def test_the_convolution_alone_is_the_same_network_in_every_variant():
    light, *others = (seeded_stage(make, attention=False).eval() for make in VARIANTS.values())
    for other in others:
        assert set(other.state_dict()) == set(light.state_dict())
        other.load_state_dict(dict(light.state_dict()))
        for ours, theirs in zip(run_stage(light, MAPS), run_stage(other, MAPS), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_the_published_convolution_alone_keeps_the_relu():
    layer = seeded_stage(MRLABase, attention=False, reading="published").eval()[0]
    value = layer.norm(F.conv2d(MAPS[0], layer.value.weight, padding=1, groups=16))
    torch.testing.assert_close(layer(MAPS[0])[0], MAPS[0] + value.relu())


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (MRLALight, {"cross_layer": False, "memory": False}, "memory=False reads no other layer"),
        (MRLALight, {"cross_layer": False, "attention": False}, "attention=False reads no other layer"),
        (MRLABase, {"attention": False, "value_conv": False}, "value_conv must be True"),
        (MLA, {"attention": False, "projection": "linear", "channels_per_head": 16}, "projection means nothing"),
    ],
)
def test_a_control_of_nothing_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(16, **{"channels_per_head": 4, **options})


@pytest.mark.parametrize("make", [MRLALight, MRLABase])
def test_weights_of_a_control_are_not_those_of_the_mechanism(make):
    """Their tensors are equal, so that nothing else would tell them apart."""
    file = io.BytesIO()
    torch.save(make(16, channels_per_head=4, cross_layer=False).state_dict(), file)
    state_dict = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    with pytest.raises(RuntimeError, match="was saved with cross_layer=False, this model has cross_layer=True"):
        make(16, channels_per_head=4).load_state_dict(state_dict)


IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("variant", ["v1", "v2", "v4", "postact", "convlstm", "convgru", "unshared"])
def test_a_state_that_is_cut_is_that_of_the_last_block_alone(variant):
    """The blocks compute what they compute without the mechanism, and the last one updates a state of zeros."""
    torch.manual_seed(0)
    plain = ResNet(Bottleneck, (1, 2, 1, 1), channels=(8, 16, 16, 16), num_classes=7, zero_init_last=False)
    names = list(plain.state_dict())
    features = plain.eval().forward_features(IMAGES)
    model = interlayer.attach(plain, "rla", variant=variant, state_channels=5, cross_layer=False).eval()
    assert set(names) <= set(model.state_dict())
    joined = model.forward_features(IMAGES)
    torch.testing.assert_close(joined[:, :64], features)
    before, block = (
        model.layer3(model.layer2(model.layer1(model.maxpool(model.act1(model.bn1(model.conv1(IMAGES))))))),
        0,
    )
    seen = {}
    handle = model.layer4[0].bn3.register_forward_hook(lambda m, a, y: seen.update(branch=y.clone()))
    output = model.layer4(before)
    handle.remove()
    read = output.x if variant == "v4" else seen.get("branch")
    state = model.rla.update(3, block, None, F.conv2d(read, model.rla.projection(3, block)))
    torch.testing.assert_close(joined[:, 64:], model.rla.last(state))
    model.train()(IMAGES).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_an_lstm_that_is_cut_starts_from_zero_at_every_block():
    torch.manual_seed(0)
    model = interlayer.attach(timm.create_model("resnet10t", num_classes=3), "dia", cross_layer=False)
    model.train()(IMAGES).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    torch.manual_seed(0)
    whole = DIA([8])
    torch.manual_seed(0)
    alone = DIA([8], cross_layer=False)
    place, y = interlayer.mechanisms.Place(0, 1, 2), torch.randn(2, 8, 4, 4)
    memory = (torch.ones(2, 8), torch.ones(2, 8))
    first, _ = whole.gate(y, [], None, place)
    assert torch.equal(alone.gate(y, [], memory, place)[0], first)
    assert not torch.allclose(whole.gate(y, [], memory, place)[0], first)
    with pytest.raises(RuntimeError, match="cross_layer=False"):
        whole.load_state_dict(alone.state_dict())
