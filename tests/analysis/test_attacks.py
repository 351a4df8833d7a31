"""Attacks: closed forms for linear networks, and a second, plain implementation with the normalization spelled out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from interlayer.analysis.attacks import fgsm, pgd

MEAN, STD = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.2, 0.25, 0.3]).view(3, 1, 1)


@pytest.fixture
def network():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 5)
    ).eval()


def cross_entropy(network, labels):
    """The loss of images from 0 to 1."""
    return lambda images: F.cross_entropy(network((images - MEAN) / STD), labels, reduction="sum")


def test_a_linear_loss_is_raised_by_epsilon_times_the_norm_of_its_weights():
    """The maximum of w x over the cube is w x + epsilon |w|_1, and both attacks reach it."""
    weights, images = torch.randn(2, 3, 5, 5), torch.full((2, 3, 5, 5), 0.5)

    def loss(x):
        return (weights * x).sum()

    expected = images + 0.1 * weights.sign()
    torch.testing.assert_close(fgsm(loss, images, 0.1), expected)
    torch.testing.assert_close(pgd(loss, images, 0.1, seeds=[0, 1]), expected)
    torch.testing.assert_close(loss(expected) - loss(images), 0.1 * weights.abs().sum())


def test_attacked_images_stay_within_epsilon_and_within_0_and_1(network):
    images, labels = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    images[0], images[1] = 0, 1
    for attacked in (
        fgsm(cross_entropy(network, labels), images, 0.3),
        pgd(cross_entropy(network, labels), images, 0.3, seeds=range(4)),
    ):
        assert attacked.min() >= 0
        assert attacked.max() <= 1
        assert (attacked - images).abs().max() <= 0.3 + 1e-6
        assert cross_entropy(network, labels)(attacked) > cross_entropy(network, labels)(images)


def plain_fgsm(network, image, label, epsilon):
    """FGSM of a single image, in the space of normalized images: epsilon is divided by the standard deviation."""
    normalized = ((image - MEAN) / STD)[None].requires_grad_()
    F.cross_entropy(network(normalized), label[None]).backward()
    moved = normalized.detach() + epsilon / STD * normalized.grad.sign()
    return torch.minimum(torch.maximum(moved, -MEAN / STD), (1 - MEAN) / STD)[0] * STD + MEAN


def plain_pgd(network, image, label, epsilon, start, steps):
    """PGD of a single image, in the space of normalized images, with the bounds of every value as tensors."""
    low = (torch.clamp(image - epsilon, min=0) - MEAN) / STD
    high = (torch.clamp(image + epsilon, max=1) - MEAN) / STD
    point = (start - MEAN) / STD
    for _ in range(steps):
        point = point.detach().requires_grad_()
        network.zero_grad()
        F.cross_entropy(network(point[None]), label[None]).backward()
        point = point.detach() + 2.5 * epsilon / steps / STD * point.grad.sign()
        point = torch.where(point < low, low, torch.where(point > high, high, point))
    return point * STD + MEAN


@pytest.mark.parametrize("epsilon", [1 / 255, 8 / 255, 0.2])
def test_fgsm_equals_a_second_implementation(network, epsilon):
    images, labels = torch.rand(3, 3, 8, 8), torch.tensor([0, 4, 2])
    attacked = fgsm(cross_entropy(network, labels), images, epsilon)
    expected = [plain_fgsm(network, image, label, epsilon) for image, label in zip(images, labels, strict=True)]
    torch.testing.assert_close(attacked, torch.stack(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize("steps", [1, 7])
def test_pgd_equals_a_second_implementation(network, steps):
    network, images, labels = network.double(), torch.rand(3, 3, 8, 8, dtype=torch.float64), torch.tensor([0, 4, 2])
    starts = [
        (x + 0.05 * torch.empty_like(x).uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))).clamp(0, 1)
        for seed, x in enumerate(images)
    ]
    for seeds, first in ((range(3), starts), (None, images)):
        attacked = pgd(cross_entropy(network, labels), images, 0.05, seeds=seeds, steps=steps)
        expected = [
            plain_pgd(network, image, label, 0.05, start, steps)
            for image, label, start in zip(images, labels, first, strict=True)
        ]
        torch.testing.assert_close(attacked, torch.stack(expected), atol=1e-7, rtol=0)


def test_a_gradient_that_is_not_a_number_is_an_error():
    with pytest.raises(ValueError, match="not a number"):
        fgsm(lambda x: (x - x).sqrt().sum() * x.sum(), torch.rand(1, 3, 4, 4), 0.1)


def test_the_length_of_a_step_can_be_given(network):
    images, labels = torch.full((1, 3, 8, 8), 0.5), torch.tensor([1])
    loss = cross_entropy(network, labels)
    torch.testing.assert_close(pgd(loss, images, 0.1, steps=1, step_size=0.01), fgsm(loss, images, 0.01))


def test_attacks_run_without_gradients_enabled_and_leave_those_of_parameters_alone(network):
    images, labels = torch.rand(2, 3, 8, 8), torch.tensor([0, 1])
    with torch.no_grad():
        attacked = pgd(cross_entropy(network, labels), images, 0.1, seeds=[0, 1])
    assert not attacked.requires_grad
    assert not images.requires_grad
    assert all(parameter.grad is None for parameter in network.parameters())
    torch.testing.assert_close(attacked, pgd(cross_entropy(network, labels), images, 0.1, seeds=[0, 1]), rtol=0, atol=0)
