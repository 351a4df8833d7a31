"""Tests that the authors' checkpoints convert, and that the converted networks compute what theirs compute.

`tests/reference` holds the names, shapes and logits of sixteen published networks. Other members of their families are
made from a network of this library, by renaming its tensors to the authors' names.
"""

import pytest
import timm
import torch
from published_names import published_gates, published_mobilenet, published_mrla, published_rla
from published_networks import PUBLISHED, described, difference, options, weights
from torch import nn

import interlayer
from interlayer.models.build import build_network


def test_every_published_network_at_hand_is_compared(reference_folder):
    assert set(PUBLISHED) == {path.stem for path in reference_folder.glob("*.npz")}


@pytest.mark.parametrize(("fixture", "name"), PUBLISHED.items(), ids=PUBLISHED.values())
def test_published_models_give_their_own_logits(fixture, name, reference_folder):
    """Converted deterministic weights give the result of the authors' program in float64."""
    description = described(reference_folder, fixture)
    model = timm.create_model(name, **options(name)).double().eval()
    model.load_state_dict(interlayer.convert_checkpoint(weights(reference_folder, fixture), model))
    assert sum(p.numel() for p in model.parameters()) == description["parameters"]
    found = difference(model, reference_folder, fixture)
    print(f"{name}: largest relative difference {found:.1e}")
    assert found < 1e-12


def converts(model, published):
    """Random tensors that are renamed to the authors' names and converted must come back, each in its place."""
    nn.Module.load_state_dict(
        model, {k: torch.randn_like(v) if v.is_floating_point() else v for k, v in model.state_dict().items()}
    )
    expected = model.state_dict()
    theirs = published(model)
    assert any(name not in expected for name in theirs), "the names must differ"
    wrapped = {"epoch": 3, "state_dict": {f"module.{name}": tensor for name, tensor in theirs.items()}}
    converted = interlayer.convert_checkpoint(wrapped, model)
    assert list(converted) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(converted[name], tensor), name
    return theirs


@pytest.mark.parametrize("fixture", ["rla_resnet50", "rlagru_resnet50", "rlaus_resnet50", "dsrla_mobilenetv2_k32_eca"])
def test_the_authors_names_are_known(fixture, reference_folder):
    """The tests below rest on the renaming to the authors' names, which the files of published networks confirm."""
    state = published_rla(timm.create_model(PUBLISHED[fixture], reading="published"))
    listed = {name: tuple(shape) for name, shape in described(reference_folder, fixture)["state"]}
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == listed


SMALL = {"layers": (1, 2, 1, 1), "num_classes": 3}  # of a ResNet: the names of its blocks are those of any depth
RLA_FAMILIES = [
    *(f"resnet50+rla:variant={variant}" for variant in ("v2", "v4", "v5", "v6", "no_exchange")),
    "resnet101+rla:variant=unshared,state_channels=12",
    "resnet101+rla:variant=convgru,state_channels=16",
    "resnet152+rla:variant=convlstm",
    "resnet152+rla:variant=postact",
    "resnet101+rla:head_activation=tanh",
    "resnet50+eca+rla:variant=v2",
    "resnet50+se+rla:variant=convgru",
    "resnet101_eca_rla",
    "resnet152_se_rla",
]


def build(name, **options):
    """Builds a network with the reading of the authors' programs."""
    if "+" in name:
        return build_network(
            name.replace("+rla", "+rla:reading=published", 1).replace("published:", "published,"), **options
        )
    return timm.create_model(name, reading="published", **options)


@pytest.mark.parametrize("name", RLA_FAMILIES)
def test_published_rla_resnets_convert(name):
    """Weights for [x, h] are split, those of the state belong to their stage, and no tensor is lost."""
    small = {"model_options": SMALL} if "+" in name else SMALL
    model = build(name, **small)
    theirs = converts(model, published_rla)
    with pytest.raises(interlayer.CheckpointError, match=r"unknown: conv_outs\.9\.weight"):
        interlayer.convert_checkpoint({**theirs, "conv_outs.9.weight": torch.zeros(model.rla.state_channels)}, model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet101_rla", "resnet152_rla", "resnet101_rla_unshared", "resnet50_rla_convgru"])
def test_published_rla_resnets_of_every_depth_convert(name):
    converts(build(name, num_classes=3), published_rla)


@pytest.mark.parametrize("name", ["mobilenetv2_rla", "mobilenetv2_eca_rla"])
@pytest.mark.parametrize("rla", [{"state_channels": 6}, {"state_channels": 24, "depthwise": False}])
def test_published_rla_mobilenets_convert(name, rla):
    model = build(name, num_classes=3, attach_options=rla)
    theirs = converts(model, published_rla)
    with pytest.raises(interlayer.CheckpointError, match=f"build it with state_channels={rla['state_channels']}"):
        interlayer.convert_checkpoint(theirs, build(name, num_classes=3))


@pytest.mark.parametrize("name", ["resnet101_se", "resnet152_eca", "resnet50+se", "resnet50+eca"])
def test_published_resnets_with_gates_convert(name):
    """The gate is timm's `se` of a block in a registered model, and an attached gate in NAME+eca."""
    options = {"model_options": SMALL} if "+" in name else SMALL
    converts(
        build_network(name, **options) if "+" in name else timm.create_model(name, **options),
        lambda model: published_gates(model.state_dict()),
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: timm.create_model("mobilenetv2_100", num_classes=3),
        lambda: timm.create_model("mobilenetv2_eca", num_classes=3, reading="published"),
    ],
    ids=["plain", "eca"],
)
def test_published_mobilenets_without_rla_convert(make):
    converts(make(), lambda model: published_mobilenet(model.state_dict()))


def test_mobilenets_of_torchvision_give_its_logits():
    """The names of torchvision's MobileNetV2 belong to the same layers."""
    torchvision = pytest.importorskip("torchvision")
    theirs = torchvision.models.mobilenet_v2(num_classes=3).eval()
    model = timm.create_model("mobilenetv2_100", num_classes=3).eval()
    model.load_state_dict(interlayer.convert_checkpoint(theirs.state_dict(), model))
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(image), theirs(image), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "resnet18_mrla_light",
        "resnet34_mrla_base",
        "efficientnet_b0_mrla_light",
        "deit_small_mrla_base",
        "pvt_v2_b0_mrla_light",
        "ceit_tiny_mrla_light",
    ],
)
def test_published_networks_with_mrla_convert(name):
    model = timm.create_model(name, reading="published", num_classes=4)

    def published(model):
        state = published_mrla(model.state_dict())
        if "resnet" in name and "base" in name:  # its stages are numbered from zero
            for stage in range(4):
                state = {key.replace(f"layer{stage + 1}.", f"stages.{stage}."): value for key, value in state.items()}
        return state

    converts(model, published)


def test_a_published_checkpoint_needs_the_published_reading():
    model = build("resnet50_rla_convgru", **SMALL)
    theirs = published_rla(model)
    with pytest.raises(interlayer.CheckpointError, match="reading='published'"):
        interlayer.convert_checkpoint(theirs, timm.create_model("resnet50_rla_convgru", **SMALL))
    with pytest.raises(ValueError, match="there is one reading of resnet50_dia: leave reading out"):
        timm.create_model("resnet50_dia", reading="published")
