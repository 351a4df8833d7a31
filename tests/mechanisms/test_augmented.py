"""Attention-augmented convolutions: the equation, gradients, and their places in a network."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import interlayer
from interlayer.mechanisms.augmented import AugmentedConv2d
from interlayer.models.build import build_network


def network() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("resnet18", num_classes=5, channels=(16, 16, 32, 32))


IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def test_the_result_is_that_of_the_equation() -> None:
    """Section 3.2, computed for every head and pair of pixels. A table read backwards would show here."""
    torch.manual_seed(0)
    heads, height, width = 2, 3, 4
    layer = AugmentedConv2d(nn.Conv2d(6, 10, 3, padding=1, bias=False), (height, width), heads=heads, value_ratio=0.4)
    assert (layer.value_channels, layer.key_channels) == (4, 40)
    x = torch.randn(1, 6, height, width)
    q, k, v = layer.qkv(x)[0].flatten(1).t().split((40, 40, 4), 1)
    attended = torch.zeros(height * width, 4)
    for head in range(heads):
        own_q, own_k = q[:, head * 20 : head * 20 + 20], k[:, head * 20 : head * 20 + 20]
        for i in range(height * width):
            scores = []
            for j in range(height * width):
                row = layer.rel_rows[j // width - i // width + height - 1]
                col = layer.rel_cols[j % width - i % width + width - 1]
                scores.append(own_q[i] @ (own_k[j] + row + col) / 20**0.5)
            attended[i, head * 2 : head * 2 + 2] = torch.stack(scores).softmax(0) @ v[:, head * 2 : head * 2 + 2]
    expected = torch.cat((layer.conv(x), layer.proj(attended.t().reshape(1, 4, height, width))), 1)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(("stride", "pooled"), [(1, False), (2, False), (1, True), (2, True)])
def test_gradients_of_every_parameter(stride: int, pooled: bool) -> None:
    """Finite differences in float64 of the input and of every parameter, also where attention's map is pooled."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, stride=stride, padding=1)
    layer = AugmentedConv2d(conv, (4, 6), heads=1, value_ratio=0.4, pooled=pooled).double()
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    x = torch.randn(1, 2, 4, 6, dtype=torch.float64, requires_grad=True)
    assert run(x, *parameters).shape == (1, 3, 4 // stride, 6 // stride)
    inputs = [x, *(parameter.detach().clone().requires_grad_() for parameter in parameters)]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_every_3x3_convolution_but_those_of_the_first_stage_is_augmented() -> None:
    """The largest maps, those of the first augmented stage, are pooled before attention."""
    model = interlayer.attach(network(), "aa", image_size=64)
    layers = interlayer.hosts.attached_mechanisms(model)
    assert list(layers) == [f"layer{s}.{b}.conv{c}" for s in (2, 3, 4) for b in (0, 1) for c in (1, 2)]
    assert [name for name, layer in layers.items() if layer.pooled] == list(layers)[:4]
    model(IMAGES).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_trained_convolutions_are_taken_over_and_restored(tmp_path: Path) -> None:
    """The channels that stay with the convolution start from the weights given, and detach gives all of them back."""
    plain = network().eval()
    interlayer.save_weights(plain, tmp_path / "plain.safetensors")
    options: Any = {"channels": (16, 16, 32, 32)}
    model = build_network(
        "resnet18+aa", num_classes=5, image_size=64, model_options=options, weights=str(tmp_path / "plain.safetensors")
    )
    conv = plain.layer3[0].conv1
    assert torch.equal(model.layer3[0].conv1.conv.weight, conv.weight[:24])
    assert torch.equal(interlayer.detach(copy.deepcopy(model)).eval()(IMAGES), plain(IMAGES))
    interlayer.save_weights(model, tmp_path / "augmented.safetensors")
    other = interlayer.attach(network(), "aa", image_size=64)
    interlayer.load_weights(other, tmp_path / "augmented.safetensors")
    assert torch.equal(other.eval()(IMAGES), model.eval()(IMAGES))


def test_images_of_another_size_interpolate_the_tables() -> None:
    model = interlayer.attach(network(), "aa", image_size=64).eval()
    assert model(torch.randn(2, 3, 96, 72)).shape == (2, 5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet18", {"stages": [5]}, "ResNet has stages 1 to 4, got stages="),
        ("resnet18", {"heads": 64}, "layer2.0.conv1 of ResNet cannot be augmented: expected value_ratio and heads"),
        ("resnet18", {"key_ratio": 0}, "key_ratio must be a fraction between 0 and 1, got 0"),
        ("resnet18", {"init": "identity"}, "aa has no option 'init'"),
        ("vit_tiny_patch16_224", {}, "VisionTransformer has no 3x3 convolutions that attention could augment"),
        ("convnext_atto", {}, "ConvNeXt has no 3x3 convolutions that attention could augment"),
    ],
)
def test_what_cannot_be_augmented_is_named(name: str, options: dict[str, Any], message: str) -> None:
    model = network() if name == "resnet18" else timm.create_model(name)
    names = list(model.state_dict())
    with pytest.raises(ValueError, match=message):
        interlayer.attach(model, "aa", **options)
    assert list(model.state_dict()) == names
