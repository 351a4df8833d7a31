"""Attention on the branch of residual blocks: its identity start."""

import copy

import pytest
import timm
import torch

import interlayer
from interlayer.hosts.placing.gates import GATES
from interlayer.models.build import build_network
from interlayer.models.checkpoints import CheckpointError


def _network(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = timm.create_model("resnet18", num_classes=5, zero_init_last=False).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model


IMAGES = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", GATES)
def test_identity_start_preserves_logits_and_trains(kind: str) -> None:
    """A trained network would lose its function, or the gate would stay where it is for ever."""
    model = _network()
    expected = model(IMAGES)
    interlayer.attach(model, kind, init="identity")
    logits = model(IMAGES)
    # a non-local block returns its map in another memory layout, so that the next convolution rounds differently
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 if kind == "nl" else 0)

    gate_parameters = {name: p for name, p in model.named_parameters() if f"{kind}_gate" in name}
    model.train()
    optimizer = torch.optim.SGD(gate_parameters.values(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(IMAGES), torch.tensor([0, 1, 2])).backward()
        optimizer.step()
    model.eval()
    assert (model(IMAGES) - expected).abs().max() > 1e-4
    last = [p for name, p in gate_parameters.items() if not p.any()]
    assert not last, "a parameter that started at zero did not move"


@pytest.mark.parametrize("kind", ["se", "eca", "cbam", "gc", "dia", "bridge"])
def test_paper_start_is_the_gate_of_the_paper(kind: str) -> None:
    """Published checkpoints need sigmoids without a factor, and state dicts without a tensor for it."""
    model = interlayer.attach(_network(), kind)
    assert not any("factor" in name for name in model.state_dict())
    assert (model(IMAGES) - _network()(IMAGES)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["se", "cbam", "dia", "bridge"])
@pytest.mark.parametrize("saved", ["identity", "paper"])
def test_weights_bring_their_factor(kind: str, saved: str, tmp_path) -> None:
    """A network that is built in one way must compute what the saved one computed that was built in the other."""
    model = interlayer.attach(_network(), kind, init=saved)
    path = tmp_path / "weights.safetensors"
    interlayer.save_weights(model, path)
    other = interlayer.attach(_network(1), kind, init="paper" if saved == "identity" else "identity")
    with pytest.raises(RuntimeError, match="factor"):
        copy.deepcopy(other).load_state_dict(model.state_dict())
    interlayer.load_weights(other, path)
    assert torch.equal(other(IMAGES), model(IMAGES))
    built = build_network(f"resnet18+{kind}:init={saved}", num_classes=5, weights=str(path)).eval()
    assert torch.equal(built(IMAGES), model(IMAGES))


def test_networks_from_weights_start_as_the_identity(tmp_path) -> None:
    """`NAME+se` with weights must classify as the network whose weights were given."""
    model, path = _network(), tmp_path / "plain.safetensors"
    interlayer.save_weights(model, path)
    for kind in GATES:
        built = build_network(f"resnet18+{kind}", num_classes=5, weights=str(path)).eval()
        torch.testing.assert_close(built(IMAGES), model(IMAGES), rtol=0, atol=1e-5 if kind == "nl" else 0)


def test_weights_without_gates_do_not_fit_strictly(tmp_path) -> None:
    """Loading a plain file strictly would leave the gates untrained without a word."""
    path = tmp_path / "plain.safetensors"
    interlayer.save_weights(_network(), path)
    model = interlayer.attach(_network(), "se", init="identity")
    with pytest.raises(CheckpointError, match="missing"):
        interlayer.load_weights(model, path)


def test_wrong_init_is_named() -> None:
    with pytest.raises(ValueError, match="init must be 'paper' or 'identity', got 'zero'"):
        interlayer.attach(_network(), "se", init="zero")


def test_the_kernel_size_of_eca_is_an_option() -> None:
    """Checkpoints of narrow networks have kernels of size 1, which the size derived from the channels never is."""
    sizes = {64: 1, 128: 3, 256: 3, 512: 7}
    model = interlayer.attach(_network(), "eca", kernel_size=sizes)
    kernels = {model.get_submodule(f"layer{n}.0.eca_gate.attention.conv").kernel_size for n in range(1, 5)}
    assert kernels == {(1,), (3,), (7,)}
    y = torch.randn(2, 64, 3, 3)
    weight = model.layer1[0].eca_gate.attention.conv.weight.flatten()
    expected = y * torch.sigmoid(weight * y.mean((2, 3), keepdim=True))
    torch.testing.assert_close(model.layer1[0].eca_gate.attention(y), expected)
    assert interlayer.attach(_network(), "eca", kernel_size=9).layer1[0].eca_gate.attention.conv.kernel_size == (9,)


@pytest.mark.parametrize(
    ("kind", "size", "reason"),
    [
        ("eca", 4, "kernel_size must be an odd whole number of at least 1, got 4"),
        ("eca", {64: True}, "kernel_size must be an odd whole number of at least 1, got True"),
        ("eca", {64: 1}, "kernel_size names no size for branches of 128 channels: add 128 to it"),
        ("se", 3, "se has no option 'kernel_size'"),
    ],
)
def test_kernel_sizes_that_do_not_fit_are_named(kind: str, size: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        interlayer.attach(_network(), kind, kernel_size=size)
