"""Tests of wrapped, copied and pickled networks, of name conflicts, and of attachments that fail."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

import interlayer
from interlayer.hosts import (
    MECHANISMS,
    Mechanism,
    attached_mechanisms,
    find_stages,
    kind_in_blocks,
    place_in_stage,
    register_mechanism,
)
from interlayer.hosts.extending import Extended
from interlayer.mechanisms import BlockMechanism
from interlayer.mechanisms.options import NoOptions

IMAGES = torch.randn(2, 3, 64, 64)


def resnet():
    return timm.create_model("resnet18", num_classes=5)


def flexible(**options):
    options = {"num_classes": 5, "img_size": 64, "dynamic_img_size": True, "depth": 4, **options}
    return timm.create_model("vit_tiny_patch16_224", **options)


def traces(model):
    """Returns the extended modules and the attributes that attaching has added."""
    classes = [name for name, module in model.named_modules() if isinstance(module, Extended)]
    return classes + [key for module in model.modules() for key in module.__dict__ if key.startswith("interlayer_")]


@pytest.mark.parametrize("mechanism", ["rla", "dia", "eca", "mrla_base"])
def test_an_attached_network_inside_another_module(mechanism):
    plain = resnet().eval()
    expected = plain(IMAGES)
    wrapper = nn.Sequential(nn.Identity(), interlayer.attach(plain, mechanism)).eval()
    modules = dict(wrapper.named_modules())
    found = attached_mechanisms(wrapper)
    assert found
    assert all(modules[name] is module for name, module in found.items())
    interlayer.detach(wrapper)
    assert {f"1.{name}" for name in resnet().state_dict()} == set(wrapper.state_dict())
    assert traces(wrapper) == []
    assert plain.num_features == 512
    if mechanism != "rla":  # which gives sleeping branches the usual start
        torch.testing.assert_close(wrapper(IMAGES), expected)


def test_a_shared_mechanism_is_not_taken_for_a_block():
    """A feature network of timm runs all its children, which include the shared mechanisms."""
    model = timm.create_model("resnet18", features_only=True)
    for mechanism in ("rla", "dia", "mrla_base"):
        interlayer.attach(model, mechanism, image_size=64)
    assert len([name for name in model.state_dict() if name.endswith(".mrla.query.weight")]) == 8
    assert not any(name.startswith(("rla.mrla", "dia_gate.mrla")) for name in model.state_dict())


class FixedWidth(timm.models.ResNet):
    """A ResNet with a fixed number of features."""

    def __setattr__(self, name, value):
        if name == "num_features" and hasattr(self, "num_features"):
            raise AttributeError("num_features is fixed")
        super().__setattr__(name, value)


def test_a_head_that_cannot_be_widened_leaves_the_network_as_it_was():
    model = FixedWidth(timm.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5).eval()
    expected = model(IMAGES)
    with pytest.raises(interlayer.AttachError, match="num_features is fixed"):
        interlayer.attach(model, "rla")
    assert traces(model) == []
    assert not any(name.startswith("rla") for name in model.state_dict())
    torch.testing.assert_close(model(IMAGES), expected)


@pytest.mark.parametrize(
    ("owner", "name", "mechanism"),
    [("layer1.1", "mrla", "mrla_light"), ("", "rla", "rla"), ("layer2.0", "eca_gate", "eca"), ("", "dia_gate", "dia")],
)
@pytest.mark.parametrize("value", [nn.Linear(2, 2), 3])
def test_a_name_that_is_taken_is_refused_and_stays(owner, name, mechanism, value):
    model = resnet().eval()
    expected = model(IMAGES)
    setattr(model.get_submodule(owner), name, value)
    with pytest.raises(interlayer.AttachError, match=f"has an attribute '{name}' already"):
        interlayer.attach(model, mechanism)
    assert getattr(model.get_submodule(owner), name) is value
    assert traces(model) == []
    torch.testing.assert_close(model(IMAGES), expected)


def test_the_name_of_a_broadcast_may_be_taken_too():
    model = flexible()
    model.blocks[3].mlp.cb = nn.Identity()
    with pytest.raises(interlayer.AttachError, match="Mlp has an attribute 'cb' already"):
        interlayer.attach(model, "cb")
    assert type(model.blocks[3].mlp.cb) is nn.Identity
    assert traces(model) == []


@pytest.mark.parametrize("options", [{}, {"num_classes": 0}, {"pre_norm": True}])
@pytest.mark.parametrize("mechanism", ["mrla_light", "mrla_base"])
def test_a_network_for_any_image_size_is_copied_and_pickled(mechanism, options):
    """The classes of such a network and of its blocks are extended more than once."""
    model = interlayer.attach(flexible(**options), mechanism, stages=[["blocks.1", "blocks.2"]]).eval()
    image = torch.randn(1, 3, 96, 32)
    expected = model(image)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(image), expected)
        assert traces(interlayer.detach(other)) == []
        assert pickle.loads(pickle.dumps(other))(image).shape == expected.shape


def test_inside_a_block_the_grid_of_any_image_size_does_not_arrive():
    model = flexible()
    with pytest.raises(interlayer.AttachError, match=r"blocks\.0\.mlp is not a block of the network but inside one"):
        interlayer.attach(model, "mrla_light", stages=[["blocks.0.mlp"], ["blocks.1.mlp"]])
    assert traces(model) == []


class ReadsMap(BlockMechanism):
    """Reads the output as a map, and has no memory."""

    reads_map = True

    def leave(self, output, values, memory, place):
        values.layout.to_map(output, values.grid)
        return output, memory


@pytest.fixture
def reads_map():
    def place(model, options, *, image_size=None):
        for number, stage in enumerate(find_stages(model, stages=(1, 3), image_size=image_size)):
            if number:
                place_in_stage(model, "reader", number, stage, [ReadsMap() for _ in stage.blocks])

    register_mechanism("reads_map", Mechanism(kind_in_blocks("reader", "reader"), NoOptions, place))
    yield "reads_map"
    del MECHANISMS["reads_map"]


def test_a_mechanism_from_outside_learns_the_grid_and_needs_no_memory(reads_map):
    model = flexible().eval()
    image = torch.randn(1, 3, 96, 32)
    expected = model(image)
    torch.testing.assert_close(interlayer.attach(model, reads_map)(image), expected)
    interlayer.attach(model, "mrla_base", stages=[["blocks.1"]])
    assert not torch.allclose(model(image), expected)
    assert traces(interlayer.detach(model)) == []
    torch.testing.assert_close(model(image), expected)


def test_an_attachment_that_fails_leaves_the_first_one_as_it_was(reads_map, monkeypatch):
    model = interlayer.attach(flexible(), "mrla_base", stages=[["blocks.0"], ["blocks.2"]]).eval()
    image = torch.randn(1, 3, 96, 32)
    expected, before = model(image), traces(model)
    monkeypatch.setattr(ReadsMap, "leave", lambda self, output, values, memory, place: 1 / 0)
    with pytest.raises(interlayer.AttachError, match="division by zero"):
        interlayer.attach(model, reads_map)
    assert traces(model) == before
    torch.testing.assert_close(model(image), expected)
