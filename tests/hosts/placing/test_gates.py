"""Attention on the branch of residual blocks: its identity start, its blocks, its stochastic depth, earlier files."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import interlayer
from interlayer.hosts.placing.gates import GATES
from interlayer.mechanisms import Place
from interlayer.mechanisms.dia import DIA
from interlayer.mechanisms.double_attention import DoubleAttention
from interlayer.mechanisms.gates import BranchAttention, TokenSE
from interlayer.models.build import build_network
from interlayer.models.checkpoints import CheckpointError
from interlayer.models.weights import start_from


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
    assert torch.equal(logits, expected)

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
        assert torch.equal(built(IMAGES), model(IMAGES)), kind


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


LAST_STAGE = ["layer4.0", "layer4.1", "layer4.2"]


@pytest.mark.parametrize(
    ("mechanism", "options", "blocks"),
    [
        ("nl", {}, ["layer3.4"]),
        ("a2", {}, ["layer2.1", "layer2.3", "layer3.1", "layer3.3", "layer3.5"]),
        ("gc", {"blocks": "one"}, ["layer3.4"]),
        ("eca", {"blocks": [0, 7]}, ["layer1.0", "layer3.0"]),
        (
            "se",
            {"blocks": "upper"},
            [*(f"layer3.{index}" for index in range(1, 6)), "layer4.0", "layer4.1", "layer4.2"],
        ),
    ],
)
def test_blocks_are_those_of_the_papers(mechanism: str, options: dict[str, Any], blocks: list[str]) -> None:
    """A gate in other blocks would be another row of the papers' tables."""
    with torch.device("meta"):
        model = interlayer.attach(timm.create_model("resnet50"), mechanism, **options)
    assert list(interlayer.hosts.attached_mechanisms(model)) == [f"{block}.{mechanism}_gate" for block in blocks]


def test_later_blocks_leave_out_the_first_stage() -> None:
    model = interlayer.attach(_network(), "gc", blocks="later")
    names = [name.removesuffix(".gc_gate") for name in interlayer.hosts.attached_mechanisms(model)]
    assert names == [f"layer{stage}.{index}" for stage in (2, 3, 4) for index in (0, 1)]


@pytest.mark.parametrize(
    ("mechanism", "options", "message"),
    [
        ("nl", {"blocks": "two"}, r"blocks must be 'all' or .*numbers of blocks from 0 such as \[11, 12\], got 'two'"),
        ("nl", {"blocks": [-1]}, "numbers of blocks from 0"),
        ("nl", {"blocks": [8]}, r"ResNet has the blocks 0 to 7, got blocks=\[8\]"),
        ("gc", {"fuse": "both"}, "fuse must be 'add' or 'scale', got 'both'"),
        ("se", {"reduction": 0}, "reduction must be a whole number of at least 1, got 0"),
        ("eca", {"drop_path": 1}, "drop_path must be a probability below 1, got 1"),
        ("dia", {"blocks": "all"}, "dia has no option 'blocks'"),
    ],
)
def test_wrong_options_are_named(mechanism: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        interlayer.attach(_network(), mechanism, **options)


@pytest.mark.parametrize("kind", GATES)
def test_a_dropped_sample_has_a_gate_of_one(kind: str) -> None:
    """MRLA Table 12 (c): stochastic depth of the gate alone leaves dropped samples as the plain network has them."""
    torch.manual_seed(0)
    model = interlayer.attach(_network(), kind, drop_path=0.5)
    gate = next(iter(interlayer.hosts.attached_mechanisms(model).values()))
    for parameter in gate.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    channels = 256 if kind in ("nl",) else 128 if kind == "a2" else 64
    y = torch.randn(64, channels, 4, 4)
    inner = [torch.randn(64, 64, 4, 4)]
    gate.train()
    for module in gate.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.eval()
    place = Place(0, 0, 2)
    trained, _ = gate.gate(y, inner, None, place)
    whole, _ = gate.eval().gate(y, inner, None, place)
    dropped = torch.tensor([torch.equal(*pair) for pair in zip(trained, y, strict=True)])
    assert 16 < dropped.sum() < 48, "about half of the samples are dropped"
    expected = y + 2 * (whole - y)
    torch.testing.assert_close(trained[~dropped], expected[~dropped], rtol=1e-4, atol=1e-4)


def test_the_rate_of_the_backbone_is_not_the_gates() -> None:
    """A recipe with stochastic depth trained SE in the same way before gates had a rate of their own."""
    model = build_network("resnet18+se", num_classes=5, drop_path_rate=0.1)
    assert isinstance(model.layer1[0].se_gate.drop_path, torch.nn.Identity)
    model = build_network("resnet18+eca:drop_path=0.2", num_classes=5)
    assert model.layer1[0].eca_gate.drop_path.drop_prob == 0.2


@pytest.mark.parametrize(
    ("kind", "earlier", "now"),
    [
        ("dia", {"reduction": 4}, {}),
        ("gc", {"fuse": "scale", "reduction": 8}, {}),
        ("nl", {"blocks": "all", "reduction": 8}, {"blocks": "all"}),
    ],
)
@pytest.mark.parametrize("init", ["paper", "identity"])
def test_weights_of_earlier_defaults_load(kind: str, earlier: Any, now: Any, init: Any, tmp_path: Path) -> None:
    """Users would lose checkpoints if only the present form of a peer could be loaded."""
    model = interlayer.attach(_network(), kind, init=init, **earlier)
    for name, parameter in model.named_parameters():
        if "_gate." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    path = tmp_path / "weights.safetensors"
    interlayer.save_weights(model, path)
    other = interlayer.attach(_network(1), kind, **now)
    before = {id(parameter) for parameter in other.parameters()}
    interlayer.load_weights(other, path)
    assert torch.equal(other(IMAGES), model(IMAGES))
    assert {id(parameter) for parameter in other.parameters()} == before, "an optimizer would hold other parameters"


@pytest.mark.parametrize(
    ("kind", "earlier"), [("dia", {"reduction": 4}), ("gc", {"fuse": "scale", "reduction": 8}), ("se", {})]
)
def test_weights_that_do_not_fit_leave_the_gates_as_they_are(kind: str, earlier: Any, tmp_path: Path) -> None:
    """An error on loading must not have given the gates of a trained network another form."""
    other = timm.create_model("resnet18", num_classes=7)
    path = tmp_path / "weights.safetensors"
    interlayer.save_weights(interlayer.attach(other, kind, init="identity", **earlier), path)
    model = interlayer.attach(_network(), kind)
    expected, names = model(IMAGES), list(model.state_dict())
    with pytest.raises(CheckpointError, match="does not fit"):
        interlayer.load_weights(model, path)
    assert list(model.state_dict()) == names
    assert torch.equal(model(IMAGES), expected)


def test_weights_with_gates_in_other_blocks_name_the_option(tmp_path: Path) -> None:
    """Earlier versions put non-local attention into all blocks."""
    path = tmp_path / "weights.safetensors"
    earlier = interlayer.attach(_network(), "nl", blocks="all", reduction=8)
    interlayer.save_weights(earlier, path)
    for load in (interlayer.load_weights, start_from):
        with pytest.raises(
            CheckpointError, match="it has nl in other blocks: set the option blocks, nl:blocks=all for"
        ):
            load(interlayer.attach(_network(), "nl"), path)
        model = interlayer.attach(_network(), "nl", blocks="all")
        load(model, path)
        assert torch.equal(model(IMAGES), earlier(IMAGES))


def test_global_context_is_added() -> None:
    """GCNet, section 3.3, computed explicitly: the context of all pixels is transformed and added to each."""
    gate = BranchAttention(32, kind="gc")
    torch.nn.init.normal_(gate.attention.mlp_add.fc2.weight)
    y = torch.randn(2, 32, 3, 5)
    weights = gate.attention.conv_attn(y).flatten(1).softmax(1)
    context = torch.einsum("bp,bcp->bc", weights, y.flatten(2))
    mlp = gate.attention.mlp_add
    hidden = torch.nn.functional.layer_norm(context @ mlp.fc1.weight[:, :, 0, 0].t() + mlp.fc1.bias, (2,), eps=1e-6)
    added = hidden.relu() @ mlp.fc2.weight[:, :, 0, 0].t() + mlp.fc2.bias
    torch.testing.assert_close(gate.gate(y, [], None, Place(0, 0, 1))[0], y + added[..., None, None])
    assert len(mlp.fc1.weight) == 2, "hidden channels are C / 16"


def test_double_attention_gathers_and_distributes() -> None:
    """A²-Nets, section 3, computed pixel by pixel."""
    gate = DoubleAttention(8).eval()
    y = torch.randn(1, 8, 2, 3)
    features, gathering, distribution = (
        layer(y)[0].flatten(1) for layer in (gate.features, gate.gathering, gate.distribution)
    )
    result = torch.zeros(4, 6)
    for pixel in range(6):
        for feature in range(4):
            gathered = sum(gathering[feature].softmax(0)[j] * features[:, j] for j in range(6))
            result[:, pixel] += distribution[:, pixel].softmax(0)[feature] * gathered
    expected = y + gate.norm(gate.output(result.reshape(1, 4, 2, 3)))
    torch.testing.assert_close(gate.gate(y, [], None, Place(0, 0, 1))[0], expected)


@pytest.mark.parametrize("kind", ["gc", "a2", "tokens", "dia"])
def test_gradients_of_every_parameter(kind: str) -> None:
    """Finite differences in float64 of the input and of every parameter."""
    torch.manual_seed(0)
    gate: Any = {
        "gc": lambda: BranchAttention(4, kind="gc", reduction=2),
        "a2": lambda: DoubleAttention(4),
        "tokens": lambda: TokenSE(4, reduction=2),
        "dia": lambda: DIA([4], reduction=2),
    }[kind]()
    gate.double().eval()
    for parameter in gate.parameters():
        torch.nn.init.normal_(parameter)
    names, parameters = zip(*gate.named_parameters(), strict=True)
    shape = (2, 3, 4) if kind == "tokens" else (2, 4, 2, 3)

    def run(y: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        with torch.nn.utils.stateless._reparametrize_module(gate, dict(zip(names, values, strict=True))):
            if kind == "tokens":
                return gate.leave(y, None, None, Place(0, 0, 1))[0]
            return gate.gate(y, [], None, Place(0, 0, 1))[0]

    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True)]
    inputs += [parameter.detach().clone().requires_grad_() for parameter in parameters]
    assert torch.autograd.gradcheck(run, inputs)


TRANSFORMERS = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 4},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "depths": (1, 1, 2, 1), "window_size": 2},
    "convnext_tiny": {"depths": (1, 1, 2, 1), "dims": (8, 16, 32, 64)},
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_squeeze_and_excitation_on_the_mlps_of_a_transformer(name: str, tmp_path: Path) -> None:
    """CB Table 3b: starts as the identity, trains, is saved, loaded and removed."""
    model = timm.create_model(name, num_classes=5, **TRANSFORMERS[name]).eval()
    expected = model(IMAGES)
    interlayer.attach(model, "se", init="identity", image_size=64)
    assert torch.equal(model(IMAGES), expected)
    names = [parameter for parameter, _ in model.named_parameters() if "mlp.se_gate.fc" in parameter]
    assert len(names) == 2 * len(interlayer.hosts.attached_mechanisms(model)) > 0
    for parameter in (model.get_parameter(name) for name in names):
        torch.nn.init.normal_(parameter)
    model.train()(IMAGES).sum().backward()
    assert all(model.get_parameter(name).grad.any() for name in names)
    logits = model.eval()(IMAGES)
    assert not torch.equal(logits, expected)
    interlayer.save_weights(model, tmp_path / "weights.safetensors")
    other = interlayer.attach(timm.create_model(name, num_classes=5, **TRANSFORMERS[name]), "se", image_size=64).eval()
    interlayer.load_weights(other, tmp_path / "weights.safetensors")
    assert torch.equal(other(IMAGES), logits)
    assert torch.equal(interlayer.detach(model)(IMAGES), expected)


def test_squeeze_and_excitation_beside_context_broadcasting() -> None:
    """Both at the end of the MLP: tokens are scaled by what their average says, in the order of attaching."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).eval()
    interlayer.attach(interlayer.attach(model, "se", blocks=[1]), "cb")
    mlp = model.blocks[1].mlp
    tokens = torch.randn(2, 17, 192)
    plain = mlp.fc2(mlp.norm(mlp.act(mlp.fc1(tokens))))
    gate = mlp.se_gate
    scaled = plain * gate.fc2(gate.fc1(plain.mean(1, keepdim=True)).relu()).sigmoid()
    torch.testing.assert_close(mlp(tokens), (scaled + scaled.mean(1, keepdim=True)) / 2)
    assert not hasattr(model.blocks[0].mlp, "se_gate")


def test_squeeze_and_excitation_says_both_places_that_a_network_lacks() -> None:
    for name in ("vit_small_8_msa", "pvt_v2_b0"):  # a layer without an MLP, and MLPs that convolve
        with pytest.raises(interlayer.AttachError, match=r"no residual blocks .*; nor has each of its blocks an MLP"):
            interlayer.attach(timm.create_model(name), "se", image_size=64 if name == "pvt_v2_b0" else None)


@pytest.mark.parametrize("kind", [kind for kind in GATES if kind != "se"])
def test_other_gates_refuse_transformers(kind: str) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2)
    with pytest.raises(interlayer.AttachError, match="no residual blocks that a mechanism can enter"):
        interlayer.attach(model, kind)
    with pytest.raises(interlayer.AttachError, match="has no stages, which blocks='one' counts"):
        interlayer.attach(model, "se", blocks="one")
