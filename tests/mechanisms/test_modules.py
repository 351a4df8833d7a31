"""Members of modules that are found faster than attributes: they must be the same objects, whatever holds them."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from interlayer.mechanisms.modules import member


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_parameters_buffers_and_submodules_are_those_of_the_module():
    model = nn.Sequential(nn.Conv2d(2, 3, 1, bias=False), nn.BatchNorm2d(3))
    convolution, norm = model
    assert member(model, "0") is convolution
    assert member(convolution, "weight") is convolution.weight
    assert member(convolution, "bias") is None
    assert member(norm, "running_mean") is norm.running_mean
    with pytest.raises(AttributeError, match="no attribute 'gamma'"):
        member(norm, "gamma")


def test_what_replaces_a_parameter_is_found():
    """A parametrization makes a property of it, and sharding and pruning a plain attribute."""
    parametrized = nn.Linear(2, 2)
    parametrize.register_parametrization(parametrized, "weight", Doubled())
    assert torch.equal(member(parametrized, "weight"), parametrized.weight)
    unregistered = nn.Linear(2, 2)
    view = unregistered.weight.detach() * 3
    del unregistered.weight
    unregistered.weight = view
    assert member(unregistered, "weight") is view


def test_functional_call_replaces_a_parameter():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * member(self, "scale")

    found = torch.func.functional_call(Layer(), {"scale": torch.tensor([2.0, 3.0])}, torch.ones(2))
    assert found.tolist() == [2.0, 3.0]
