"""Tests of replaced layers: the weights of a backbone must survive replacing and restoring."""

import pytest
import timm
import torch
from recipe_networks import build_network

import interlayer
from interlayer.training import load_recipe


def resnet():
    return timm.create_model("resnet18", num_classes=5)


def vit():
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=4, num_classes=5)


CASES = [(resnet, "halo", {"stages": (4,)}), (vit, "cb", {"where": "head"}), (vit, "cb", {"where": "extra_head"})]


@pytest.mark.parametrize(("make", "mechanism", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_they_come_back_on_the_networks_terms(make, mechanism, options, dtype):
    """The restored layer has the current dtype and mode of the network."""
    model = interlayer.attach(make(), mechanism, image_size=32, **options).to(dtype).eval()
    plain = interlayer.detach(model)
    assert {p.dtype for p in plain.parameters()} == {dtype}
    assert not any(module.training for module in plain.modules())
    plain(torch.randn(1, 3, 32, 32, dtype=dtype))


@pytest.mark.parametrize(("make", "mechanism", "options"), CASES)
def test_a_plain_backbones_weights_reach_them(make, mechanism, options):
    source, image = make().eval(), torch.randn(1, 3, 32, 32)
    model = interlayer.attach(make(), mechanism, image_size=32, **options).eval()
    report = interlayer.load_backbone(model, source.state_dict())
    assert set(report.placed) == set(source.state_dict())
    if mechanism == "cb":  # as if it had been attached to the loaded network
        loaded = vit()
        loaded.load_state_dict(source.state_dict())
        loaded = interlayer.attach(loaded, mechanism, **options)
        assert torch.equal(model.blocks[3].attn.qk.weight, loaded.blocks[3].attn.qk.weight)
    torch.testing.assert_close(interlayer.detach(model)(image), source(image))


@pytest.mark.parametrize(("make", "mechanism", "options"), CASES[:2])
def test_a_recipe_starts_from_them(make, mechanism, options, tmp_path):
    source = make()
    interlayer.save_weights(source, tmp_path / "plain.safetensors")
    name, size = ("resnet18", 64) if mechanism == "halo" else ("vit_tiny_patch16_224", 32)
    model_options = {} if mechanism == "halo" else {"img_size": 32, "patch_size": 8, "depth": 4}
    recipe = load_recipe(
        "digits", model=f"{name}+{mechanism}", weights=str(tmp_path / "plain.safetensors"), image_size=size,
        model_options=model_options, attach_options=options,
    )  # fmt: skip
    network = interlayer.detach(build_network(recipe, 5)).eval()
    image = torch.randn(1, 3, size, size)
    torch.testing.assert_close(network(image), source.eval()(image))


def test_a_network_without_weights():
    with torch.device("meta"):
        model = vit()
    model = interlayer.attach(model, "cb", where="head")
    model.to_empty(device="cpu")
    assert not any(p.is_meta for p in interlayer.detach(model).parameters())


class OneConvolution(torch.nn.Module):
    feature_info = [{"module": "stage"}]  # noqa: RUF012
    default_cfg = {"input_size": (32, 8, 8)}  # noqa: RUF012

    def __init__(self, **options):
        super().__init__()
        self.stage = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Conv2d(32, 32, 3, bias=False, **options)))

    def forward(self, x):
        return self.stage(x)


def test_convolutions_that_attention_is_no_match_for_stay():
    """A convolution without padding, or with a stride in one direction, returns a map of another size."""
    model = OneConvolution(padding=1)
    assert interlayer.attach(model, "halo", block=4)(torch.randn(1, 32, 8, 8)).shape == (1, 32, 8, 8)
    for options in ({"padding": 0}, {"padding": 1, "stride": (1, 2)}):
        with pytest.raises(interlayer.AttachError, match="has no 3x3 convolutions"):
            interlayer.attach(OneConvolution(**options), "halo", block=4)


def test_bad_options_are_one_sentence():
    for options in ({"stages": 4}, {"last": "3"}, {"channels_per_head": 0}):
        with pytest.raises(interlayer.AttachError, match="expected stages such as"):
            interlayer.attach(resnet(), "halo", **options)
