"""Every mechanism names its controls, and a mechanism from outside the package names its own in the same way."""

from dataclasses import dataclass

import pytest
import timm
import torch
from torch import nn

import interlayer
from interlayer.hosts import (
    MECHANISMS,
    AttachError,
    Control,
    Mechanism,
    controls_of,
    find_stages,
    kind_in_blocks,
    options_of,
    place_in_stage,
    register_mechanism,
)
from interlayer.mechanisms import BlockMechanism
from interlayer.mechanisms.options import expect_flag, option

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
CROSS_LAYER = ("mrla_light", "crla", "mrla_base", "mla", "mrla_linear", "rla", "dia")
ROWS = [(name, control) for name in MECHANISMS for control in MECHANISMS[name].controls]


def test_mechanisms_that_read_other_layers_have_controls_and_the_others_have_the_plain_network():
    assert {name for name, _ in ROWS} == set(CROSS_LAYER)
    for name in CROSS_LAYER:
        assert dict(MECHANISMS[name].controls[0].options) == {"cross_layer": False}, "the mildest control first"


@pytest.mark.parametrize(("name", "control"), ROWS, ids=lambda value: value if isinstance(value, str) else value.left)
def test_a_control_can_be_attached_and_is_another_function(name, control):
    assert set(control.options) | set(control.without) | set(control.unless) <= set(options_of(name))
    outputs = []
    for options in ({}, control.options):
        torch.manual_seed(0)
        model = timm.create_model("resnet10t", num_classes=5, layers=(2, 2, 1, 1), zero_init_last=False)
        torch.manual_seed(0)
        interlayer.attach(model, name, **options)
        outputs.append(model.eval()(IMAGES))
    assert not torch.allclose(*outputs, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "left"),
    [
        ("mrla_light", {}, ["cross_layer", "attention"]),
        ("mrla_light", {"memory": False}, ["attention"]),
        ("mrla_light", {"value_conv": False}, ["cross_layer"]),
        ("mrla_light", {"attention": False}, []),
        ("mrla_base", {"attention": False}, []),
        ("mrla_base", {"cross_layer": False}, []),
        ("rla", {"variant": "no_exchange"}, ["cross_layer"]),
        ("cb", {}, []),
        ("halo", {}, []),
    ],
)
def test_a_mechanism_that_does_not_do_what_is_tested_has_no_such_control(name, options, left):
    assert [next(iter(control.options)) for control in controls_of(name, options)] == left


def test_options_without_meaning_in_a_control_are_left_out():
    given = {"learn_decay": False, "previous": "shortcut", "channels_per_head": 8}
    cut, convolution = MECHANISMS["mrla_light"].controls
    assert cut.options_for(given) == {"learn_decay": False, "channels_per_head": 8, "cross_layer": False}
    assert convolution.options_for(given) == {"channels_per_head": 8, "attention": False}


@pytest.mark.parametrize("mechanism", ["mrla_light", "mrla_base"])
def test_the_scores_of_a_control_are_those_of_each_layer_for_itself(mechanism):
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=6, num_classes=3)
    interlayer.attach(model, mechanism, cross_layer=False)
    for stage in interlayer.layer_scores(model, IMAGES):
        scores = stage.scores.mean((0, 1))
        assert scores.shape == (2, 2)
        assert torch.equal(scores, scores.diag().diag())
        assert (scores.diag() > 0).all()


@dataclass(frozen=True)
class EchoOptions:
    cross_layer: bool = option(True, "False adds the output to itself", check=expect_flag)


class Echo(BlockMechanism):
    """Adds a part of the output of the block before."""

    def __init__(self, options):
        super().__init__()
        self.cross_layer, self.weight = options.cross_layer, nn.Parameter(torch.full((), 0.1))

    def leave(self, output, values, memory, place):
        return output + self.weight * (output if memory is None or not self.cross_layer else memory), output


@pytest.fixture
def echo():
    def place(model, options, *, image_size=None):
        for number, stage in enumerate(find_stages(model, image_size=image_size)):
            place_in_stage(model, "echo", number, stage, [Echo(options) for _ in stage.blocks])

    controls = (Control({"cross_layer": False}, left="its own output", tested="the block before"),)
    register_mechanism("echo", Mechanism(kind_in_blocks("echo", "echo"), EchoOptions, place, "an echo", controls))
    yield "echo"
    del MECHANISMS["echo"]


def test_a_control_that_nothing_would_read_is_refused():
    """Without exchange only the classifier reads RLA's state, and a feature extractor has none."""
    model = timm.create_model("resnet18", features_only=True)
    with pytest.raises(AttachError, match="has no classifier, and with exchange=False nothing else would read"):
        interlayer.attach(model, "rla", exchange=False)


def test_a_mechanism_from_outside_names_its_controls(echo):
    from interlayer.models.names import control_networks

    (network,) = control_networks("resnet10t+echo")
    assert (network.name, network.control.tested) == ("resnet10t+echo:cross_layer=false", "the block before")
    model = interlayer.attach(timm.create_model("resnet10t"), echo, cross_layer=False)
    assert model(IMAGES).shape == (2, 1000)
