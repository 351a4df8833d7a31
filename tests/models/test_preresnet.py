"""Tests of pre-activation ResNets for small images: parameters in the RLA paper, and the interface of timm."""

import pytest
import timm
import torch

import interlayer
from interlayer.analysis import count_parameters


@pytest.mark.parametrize(
    ("name", "classes", "expected"),
    [
        ("preresnet110_cifar", 10, 1_730_554),
        ("preresnet110_cifar", 100, 1_736_404),
        ("preresnet164_cifar", 10, 1_703_290),
        ("preresnet164_cifar", 100, 1_726_420),
    ],
)
def test_parameters_are_those_of_the_paper(name, classes, expected):
    assert count_parameters(timm.create_model(name, num_classes=classes)) == expected


def test_depth_counts_convolutions_and_the_classifier():
    for name, depth in (("preresnet20_cifar", 20), ("preresnet56_cifar", 56), ("preresnet164_cifar", 164)):
        model = timm.create_model(name)
        convolutions = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Conv2d) and "shortcut" not in n]
        assert len(convolutions) + 1 == depth


@pytest.mark.parametrize("mechanism", [None, "mrla_light", "mrla_base"])
def test_every_parameter_gets_a_gradient(mechanism):
    model = timm.create_model("preresnet20_cifar")
    if mechanism:
        interlayer.attach(model, mechanism, channels_per_head=8)
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_the_block_adds_its_branch_to_the_raw_input():
    block = timm.create_model("preresnet20_cifar").stages[0][1].eval()
    x = torch.randn(2, 16, 8, 8)
    branch = block.convs[1](block.norms[1](block.convs[0](block.norms[0](x).relu())).relu())
    torch.testing.assert_close(block(x), x + branch)


def test_features_agree_with_the_network():
    model = timm.create_model("preresnet20_cifar").eval()
    image = torch.randn(2, 3, 32, 32)
    final, features = model.forward_intermediates(image, norm=True)
    torch.testing.assert_close(final, model.forward_features(image))
    torch.testing.assert_close(features[-1], final)
    wrapped = timm.create_model("preresnet20_cifar", features_only=True, out_indices=(0, 1))
    assert [tuple(f.shape[1:]) for f in wrapped(image)] == [(16, 32, 32), (32, 16, 16)]
    assert wrapped.feature_info.channels() == [16, 32]


def test_gradient_checkpointing_changes_nothing():
    model = timm.create_model("preresnet20_cifar")
    image = torch.randn(2, 3, 32, 32)
    expected = model(image)
    model.set_grad_checkpointing()
    torch.testing.assert_close(model(image), expected)


def test_the_head_can_be_replaced():
    model = timm.create_model("preresnet20_cifar")
    model.reset_classifier(7)
    assert model(torch.randn(1, 3, 16, 16)).shape == (1, 7)
    model.reset_classifier(0)
    assert model(torch.randn(1, 3, 16, 16)).shape == (1, 64)


def test_a_head_needs_a_pooling():
    """Otherwise the first batch would fail with an error about matrix sizes. An existing model is not changed."""
    with pytest.raises(ValueError, match="give num_classes=0 too, got 10"):
        timm.create_model("preresnet20_cifar", global_pool="")
    model = timm.create_model("preresnet20_cifar", num_classes=0, global_pool="")
    with pytest.raises(ValueError, match="give num_classes=0 too, got 3"):
        model.reset_classifier(3)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 64, 8, 8)
    model.reset_classifier(3, "max")
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
