"""Tests of building networks from their names."""

import pytest
import torch
from torch import nn

from interlayer.models.build import ModelError, build_network, check_size, parse_value, plain_name, split_name


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("resnet18", "resnet18"),
        ("resnet18_mrla_light", "resnet18"),
        ("resnet18+eca+mrla_light:channels_per_head=8", "resnet18"),
        ("preresnet20_cifar_rla", "preresnet20_cifar"),
    ],
)
def test_the_plain_backbone_of_a_name(name, plain):
    assert plain_name(name) == plain


def test_a_name_is_split_into_mechanisms_with_their_options():
    assert split_name("vit_tiny_patch16_224+cb:scaled=true,blocks=all+mla") == (
        "vit_tiny_patch16_224",
        [("cb", {"scaled": True, "blocks": "all"}), ("mla", {})],
    )
    assert split_name("resnet18+mrla_base:stages=[[layer3.0,layer3.1],[layer4.1]],drop_path=0.2,")[1] == [
        ("mrla_base", {"stages": [["layer3.0", "layer3.1"], ["layer4.1"]], "drop_path": 0.2})
    ]
    assert parse_value("0.5") == 0.5
    assert parse_value("[") == "["
    assert parse_value("") is None


def test_every_option_changes_the_network():
    small = {"blocks": 1, "widths": (8, 8, 8)}
    network = build_network(
        "preresnet20_cifar+mrla_light:channels_per_head=4", num_classes=3, image_size=16, drop_rate=0.2,
        model_options=small, attach_options={"drop_path": 0.3}, zero_head=True, batch_norm_momentum=0.01,
    )  # fmt: skip
    assert network.head.weight.shape == (3, 8)
    assert not network.head.weight.any()
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {norm.momentum for norm in norms} == {0.01}
    attention = network.stages[0][0].mrla
    assert attention.describe()["channels_per_head"] == "4"
    assert {module.drop_prob for module in network.modules() if type(module).__name__ == "DropPath"} == {0.3}
    assert network.head_drop.p == 0.2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"name": "resnet18+"}, "expected NAME"),
        ({"name": "resnte18"}, "unknown model 'resnte18'; did you mean"),
        ({"name": "resnet18", "attach_options": {"init": "identity"}}, "attach_options need a mechanism"),
        ({"name": "resnet18+rla:colour=red", "image_size": 32}, "the options do not fit rla"),
        ({"name": "resnet18", "model_options": {"colour": 1}}, "resnet18 cannot be built with colour=1: "),
    ],
)
def test_what_cannot_be_built_is_one_sentence(arguments, reason):
    with pytest.raises(ModelError, match=reason):
        build_network(**arguments)


def test_a_size_that_a_network_does_not_take_is_refused():
    network = build_network("vit_tiny_patch16_224", image_size=32, model_options={"depth": 1})
    check_size(network, "vit", 32)
    with pytest.raises(ModelError, match="vit does not take images of 48 x 48"):
        check_size(network, "vit", 48)
    assert torch.is_grad_enabled()
