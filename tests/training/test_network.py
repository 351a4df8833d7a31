"""Were these wrong, a run would start from other weights than its recipe says, or refuse options nobody gave."""

import pytest
import timm
import torch

import interlayer
from interlayer.training import load_recipe
from interlayer.training.network import build_network


@pytest.mark.parametrize("mechanism", ["rla", "mrla_light", "eca", "dia"])
def test_a_plain_backbones_weights_start_a_network_with_a_mechanism(mechanism, tmp_path):
    """Also the classifier's, which a state widens; and no mechanism is given options it does not have."""
    plain = timm.create_model("preresnet20_cifar").eval()
    interlayer.save_weights(plain, tmp_path / "plain.safetensors")
    recipe = load_recipe(
        "digits", model=f"preresnet20_cifar+{mechanism}", weights=str(tmp_path / "plain.safetensors"), attach_options={}
    )
    network = build_network(recipe, 10).eval()
    image = torch.randn(2, 3, 32, 32)
    if mechanism in ("rla", "mrla_light"):  # those with init="identity"
        torch.testing.assert_close(network(image), plain(image))
    weight = network.head.weight[:, : plain.head.in_features]
    assert torch.equal(weight, plain.head.weight)


@pytest.mark.parametrize("mechanism", ["rla", "eca", "mrla_light"])
def test_stochastic_depth_goes_to_those_that_have_it(mechanism):
    recipe = load_recipe("digits", model=f"resnet18+{mechanism}", drop_path_rate=0.1, attach_options={}, image_size=32)
    rates = [m.drop_prob for m in build_network(recipe, 10).modules() if type(m).__name__ == "DropPath"]
    assert len(rates) == (14 if mechanism == "mrla_light" else 7)
