"""Pretrained weights from a package: nothing is downloaded."""

import pytest
import timm
import torch

from interlayer.models.build import build_network
from interlayer.models.packaged import has_package, packaged_weights

NAME = "tf_efficientnet_lite0"
if not has_package(NAME):
    pytest.skip("the package of weights is not installed", allow_module_level=True)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr("interlayer.models.pretrained.unreachable_reason", lambda: pytest.fail("the Hub was asked"))


def test_tensors_have_timms_names_and_shapes():
    """They are matched by order: a model of another version with another order must not load nonsense."""
    expected = timm.create_model(NAME).state_dict()
    assert {name: tensor.shape for name, tensor in packaged_weights(NAME).items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }


@pytest.mark.parametrize("name", [NAME, f"{NAME}.in1k", f"{NAME}+mrla_light"])
def test_pretrained_networks_need_no_download(name):
    network = build_network(name, pretrained=True)
    torch.testing.assert_close(network.conv_stem.weight, packaged_weights(NAME)["conv_stem.weight"], rtol=0, atol=0)
    assert "state_dict" not in network.pretrained_cfg, "the weights would be stored twice"


def test_another_classifier_and_another_number_of_channels_are_adapted():
    """timm does it, as with downloaded weights."""
    network = build_network(NAME, pretrained=True, num_classes=7, model_options={"in_chans": 1})
    weights = packaged_weights(NAME)
    assert network.classifier.weight.shape == (7, 1280)
    torch.testing.assert_close(network.conv_stem.weight, weights["conv_stem.weight"].sum(1, keepdim=True))
    torch.testing.assert_close(network.conv_head.weight, weights["conv_head.weight"], rtol=0, atol=0)
