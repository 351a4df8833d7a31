"""A run starts from the weights that its recipe names, and options reach only the mechanisms that have them."""

import pytest
import timm
import torch
from recipe_networks import build_network

import interlayer
from interlayer.training import RecipeError, load_recipe


@pytest.mark.parametrize("mechanism", ["rla", "mrla_light", "eca", "dia"])
def test_a_plain_backbones_weights_start_a_network_with_a_mechanism(mechanism, tmp_path):
    """Includes the classifier, which a recurrent state widens. No mechanism receives options that it does not have."""
    plain = timm.create_model("preresnet20_cifar").eval()
    interlayer.save_weights(plain, tmp_path / "plain.safetensors")
    recipe = load_recipe(
        "digits", model=f"preresnet20_cifar+{mechanism}", weights=str(tmp_path / "plain.safetensors"), attach_options={}
    )
    network = build_network(recipe, 10).eval()
    image = torch.randn(2, 3, 32, 32)
    if mechanism in ("rla", "mrla_light"):  # mechanisms that start as the identity
        torch.testing.assert_close(network(image), plain(image))
    weight = network.head.weight[:, : plain.head.in_features]
    assert torch.equal(weight, plain.head.weight)


@pytest.mark.parametrize("mechanism", ["rla", "eca", "mrla_light"])
def test_stochastic_depth_goes_to_those_that_have_it(mechanism):
    recipe = load_recipe("digits", model=f"resnet18+{mechanism}", drop_path_rate=0.1, attach_options={}, image_size=32)
    rates = [m.drop_prob for m in build_network(recipe, 10).modules() if type(m).__name__ == "DropPath"]
    assert len(rates) == (14 if mechanism == "mrla_light" else 7)


def test_weights_of_other_blocks_start_a_halonet(tmp_path):
    """Appendix E: relative position tables are interpolated if the size differs, and other weights are copied."""
    options = {"depths": (1, 1, 1, 1), "num_classes": 10}
    trained = timm.create_model("halo_h0", block=4, halo=1, **options)
    interlayer.save_weights(trained, tmp_path / "trained.safetensors")

    def start(block, halo):
        recipe = load_recipe(
            "digits", model="halo_h0", weights=str(tmp_path / "trained.safetensors"), image_size=32, attach_options={},
            model_options={"depths": [1, 1, 1, 1], "block": block, "halo": halo},
        )  # fmt: skip
        return build_network(recipe, 10)

    name = "stages.1.0.spatial.rel_rows"
    table = trained.state_dict()[name]
    larger = start(8, 2).state_dict()
    assert larger[name].shape == (2 * 12 - 1, table.shape[1])
    same = start(4, 1).state_dict()
    for key, value in trained.state_dict().items():
        assert torch.equal(same[key], value), key
        assert ".rel_" in key or torch.equal(larger[key], value), key
    torch.testing.assert_close(larger[name][[0, 11, 22]], table[[0, 5, 10]])  # the two ends and the row of offset zero


def test_several_mechanisms_with_their_options():
    recipe = load_recipe(
        "digits", model="vit_tiny_patch16_224+cb:scaled=true,blocks=all+mrla_light:channels_per_head=8", image_size=32,
        attach_options={}, model_options={"patch_size": 8, "depth": 3},
    )  # fmt: skip
    names = [name for name, _ in build_network(recipe, 10).named_parameters()]
    assert sum(name.endswith(".cb.scale") for name in names) == 3
    assert any(".mrla." in name for name in names)


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        ("resnet18+", {}, "names no mechanism after"),
        ("resnet18+rla:variant", {}, "expected NAME"),
        ("resnet18+eca+rla", {"state_channels": 8}, "write them behind each"),
        ("resnet18", {"state_channels": 8}, "attach_options need a mechanism"),
        ("resnet18+rla:colour=red", {}, "the options do not fit rla"),
    ],
)
def test_names_that_say_nothing_are_refused(model, options, reason):
    with pytest.raises(RecipeError, match=reason):
        build_network(load_recipe("digits", model=model, attach_options=options, image_size=32), 10)
