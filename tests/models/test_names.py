"""Names of networks: options of named models, and the names of controls."""

import pytest
import torch

from interlayer.models.build import ModelError, build_network, check_network, plain_name, split_name
from interlayer.models.names import control_networks, own_options, same_network


def names(name, options=None):
    return [network.name for network in control_networks(name, options)]


@pytest.mark.parametrize(
    ("name", "controls"),
    [
        ("resnet18+mrla_light", ["cross_layer=false", "attention=false"]),
        ("resnet18+mrla_base", ["cross_layer=false"]),
        ("resnet18+rla", ["cross_layer=false", "exchange=false"]),
    ],
)
def test_controls_are_options_of_the_mechanism(name, controls):
    assert names(name) == [f"{name}:{options}" for options in controls]


def test_other_options_and_mechanisms_stay_as_they_are_written():
    assert names("vit_tiny_patch16_224+cb:spare_pyramid=[3,5],scaled=true+mrla_base:stages=[6,6]") == [
        "vit_tiny_patch16_224+cb:spare_pyramid=[3,5],scaled=true+mrla_base:stages=[6,6],cross_layer=false"
    ]
    assert names("resnet18+eca+rla+mrla_base") == [
        "resnet18+eca+rla:cross_layer=false+mrla_base",
        "resnet18+eca+rla:exchange=false+mrla_base",
        "resnet18+eca+rla+mrla_base:cross_layer=false",
    ]


def test_networks_that_read_no_other_layer_have_no_control_but_the_plain_network():
    for name in ("resnet18", "resnet18+se", "halo_h0", "resnet50_se", "resnet18+mrla_light:attention=false"):
        assert names(name) == []


def test_options_of_a_recipe_that_mean_nothing_in_a_control_are_set_back():
    options = {"learn_decay": False, "previous": "shortcut", "channels_per_head": 16}
    cut, convolution = names("resnet18+mrla_light", options)
    for name in (cut, convolution):
        build_network(name, num_classes=2, attach_options=options)
    assert split_name(convolution)[1] == [("mrla_light", {"learn_decay": True, "previous": None, "attention": False})]


def test_a_named_model_takes_options_of_its_mechanism():
    """As attach_options= of timm.create_model; the control of a named model is written in this way."""
    assert names("resnet18_mrla_light") == [
        "resnet18_mrla_light:cross_layer=false",
        "resnet18_mrla_light:attention=false",
    ]
    assert own_options("resnet18_mrla_light:drop_path=0.1,cross_layer=false") == {
        "drop_path": 0.1,
        "cross_layer": False,
    }
    assert plain_name("resnet18_mrla_light:cross_layer=false") == "resnet18"
    torch.manual_seed(0)
    ours = build_network("resnet18_mrla_light:cross_layer=false,drop_path=0.0", num_classes=2).eval()
    torch.manual_seed(0)
    options = {"attach_options": {"cross_layer": False, "drop_path": 0.0}}
    theirs = build_network("resnet18_mrla_light", num_classes=2, model_options=options).eval()
    image = torch.randn(1, 3, 64, 64)
    assert torch.equal(ours(image), theirs(image))
    assert not ours.layer1[0].mrla.cross_layer


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet18:cross_layer=false", "resnet18 has no mechanism by itself that could take options"),
        ("resnet50_se:reduction=4", r"write them behind the mechanism, as in resnet50_se\+MECHANISM:OPTION=VALUE"),
        ("resnet18_mrla_light:", "expected NAME"),
        ("resnet18_mrla_light:fast", "expected NAME"),
    ],
)
def test_options_of_no_mechanism_are_refused(name, message):
    for function in (check_network, build_network):
        with pytest.raises(ModelError, match=message):
            function(name)


def test_an_unknown_option_of_a_named_model_is_named():
    with pytest.raises(ModelError, match="mrla_light has no option 'cros_layer', did you mean cross_layer"):
        build_network("resnet18_mrla_light:cros_layer=false")


def test_the_order_of_options_does_not_matter():
    assert same_network("a+mrla_light:memory=false,init=identity", "a+mrla_light:init=identity,memory=false")
    assert not same_network("a+mrla_light", "a+mrla_light:memory=false")
    assert not same_network("resnet18_mrla_light", "resnet18_mrla_light:memory=false")


def test_a_named_model_with_options_is_stored_so_that_timm_builds_it():
    """The name of an architecture in config.json must be one that timm knows."""
    from types import SimpleNamespace

    from interlayer.experiments.hub import _architecture
    from interlayer.training.recipe import from_values

    def stored(**values):
        return _architecture(SimpleNamespace(recipe=from_values(values), transform=SimpleNamespace(size=32)))

    options = {"attach_options": {"drop_path": 0.1, "cross_layer": False}}
    assert stored(
        model="resnet18_mrla_light:cross_layer=false", model_options={"attach_options": {"drop_path": 0.1}}
    ) == ("resnet18_mrla_light", options)
    further = "resnet18_mrla_light:cross_layer=false+eca"
    assert stored(model=further) == (further, {}), "built by this library"
