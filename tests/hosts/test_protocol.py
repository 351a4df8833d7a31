"""Tests that a new kind of mechanism can be added without a change in the package."""

import copy
import pickle

import outside_mechanisms  # noqa: F401  registers its mechanisms
import pytest
import timm
import torch

import interlayer
from interlayer.hosts import MECHANISMS, Mechanism, options_of, register_mechanism

NAMES = ["weighted_sum", "two_streams"]
NETWORKS = {"resnet18": {}, "vit_tiny_patch16_224": {"img_size": 64, "depth": 5}, "convnext_atto": {}}


def make(name):
    return timm.create_model(name, num_classes=5, **NETWORKS[name])


IMAGES = torch.randn(2, 3, 64, 64)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("mechanism", NAMES)
def test_it_attaches_as_the_identity_trains_and_comes_out_again(mechanism, network):
    plain = make(network).eval()
    expected = plain(IMAGES)
    model = interlayer.attach(copy.deepcopy(plain), mechanism)
    torch.testing.assert_close(model(IMAGES), expected)
    own = [parameter for name, parameter in model.named_parameters() if mechanism in name and parameter.numel()]
    assert own
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()(IMAGES).square().sum().backward()
    assert all(parameter.grad is not None for parameter in own)
    assert any(parameter.grad.abs().sum() > 0 for parameter in own)
    optimizer.step()
    assert not torch.allclose(model.eval()(IMAGES), expected)
    trained = {name: tensor for name, tensor in model.state_dict().items() if mechanism not in name}
    assert trained.keys() == plain.state_dict().keys()
    detached = interlayer.detach(model)
    assert type(detached) is type(plain)
    plain.load_state_dict(trained)
    torch.testing.assert_close(detached(IMAGES), plain(IMAGES))


def moved(network, mechanism):
    """Returns an attached network that is no longer the identity."""
    model = interlayer.attach(make(network), mechanism).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if mechanism in name:
                parameter.add_(0.3)
    return model


@pytest.mark.parametrize("network", ["resnet18", "vit_tiny_patch16_224"])
@pytest.mark.parametrize("mechanism", NAMES)
def test_it_compiles_exports_copies_and_checkpoints(mechanism, network):
    model = moved(network, mechanism)
    expected = model(IMAGES)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(IMAGES), expected)
    exported = torch.export.export(model, (IMAGES,)).module()
    torch.testing.assert_close(exported(IMAGES), expected)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(IMAGES), expected)
    plain, checkpointed = IMAGES.clone().requires_grad_(), IMAGES.clone().requires_grad_()
    model(plain).sum().backward()
    model.set_grad_checkpointing(True)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    model(checkpointed).sum().backward()
    torch.testing.assert_close(checkpointed.grad, plain.grad)


@pytest.mark.parametrize("mechanism", NAMES)
@pytest.mark.parametrize("beside", ["mrla_light", "mrla_base", "rla", "eca"])
def test_it_goes_beside_the_packages_own_in_any_order(beside, mechanism):
    torch.manual_seed(0)
    one = interlayer.attach(interlayer.attach(make("resnet18"), beside), mechanism)
    other = interlayer.attach(interlayer.attach(make("resnet18"), mechanism), beside)
    for model in (one, other):
        model.train()(IMAGES).sum().backward()
        assert all(p.grad is not None for p in model.parameters() if p.numel())
    assert set(one.state_dict()) == set(other.state_dict())
    names = [name for name in one.state_dict() if mechanism in name or ".mrla." in name or name.startswith("rla.")]
    assert names
    assert not any("mrla" in name or mechanism in name or "rla" in name for name in interlayer.detach(one).state_dict())


def test_a_name_cannot_be_taken_twice_and_options_are_checked():
    with pytest.raises(ValueError, match="there is already a mechanism 'weighted_sum'"):
        register_mechanism("weighted_sum", MECHANISMS["weighted_sum"])
    with pytest.raises(TypeError, match="two_streams has no option 'depth', it has none"):
        interlayer.attach(make("resnet18"), "two_streams", depth=3)
    with pytest.raises(interlayer.AttachError, match="already has weighted sum: detach it first"):
        interlayer.attach(interlayer.attach(make("resnet18"), "weighted_sum"), "weighted_sum")
    assert isinstance(MECHANISMS["two_streams"], Mechanism)
    assert options_of("two_streams") == {}
