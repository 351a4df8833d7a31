"""Tests of the LSTM and GRU cells of recurrent layer aggregation against their equations."""

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.resnet import Bottleneck, ResNet

import interlayer
from interlayer.mechanisms.recurrent_cells import ConvGRU, ConvLSTM

K = 4


def tensors(*channels):
    return [torch.randn(2, count, 5, 6, dtype=torch.float64) for count in channels]


def randomised(cell):
    """A cell whose biases and norms are not those of its initialization, which could hide errors."""
    for parameter in cell.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return cell.double()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gates", ["hard_sigmoid", "sigmoid"])
def test_the_lstm_is_that_of_keras_or_the_published_one(gates, bias):
    cell = randomised(ConvLSTM(K, bias=bias, gate_activation=gates))
    x, h, c = tensors(K, K, K)
    a = torch.sigmoid if gates == "sigmoid" else lambda value: torch.clip(0.2 * value + 0.5, 0, 1)
    weights, biases = cell.gates.weight.split(K), cell.gates.bias.split(K) if bias else [None] * 4
    i, f, o, g = (F.conv2d(torch.cat((x, h), 1), w, b, padding=1) for w, b in zip(weights, biases, strict=True))
    expected_c = a(f) * c + a(i) * torch.tanh(g)
    hidden, memory = cell(x, (h, c))
    torch.testing.assert_close(memory, expected_c)
    torch.testing.assert_close(hidden, a(o) * torch.tanh(expected_c))
    assert (gates == "hard_sigmoid") == bool((a(f) == 0).any()), "the test must reach both ends of the hard sigmoid"


@pytest.mark.parametrize("gate_norm", [True, False])
def test_the_gru_is_the_published_one_or_has_no_norms(gate_norm):
    cell = randomised(ConvGRU(K, gate_norm=gate_norm))
    x, h = tensors(K, K)

    def norm(value, module):
        if not gate_norm:
            return value
        mean, variance = value.mean((1, 2, 3), keepdim=True), value.var((1, 2, 3), keepdim=True, unbiased=False)
        scaled = (value - mean) / torch.sqrt(variance + 1e-6)
        return scaled * module.weight[:, None, None] + module.bias[:, None, None]

    r, u = F.conv2d(torch.cat((x, h), 1), cell.gates.weight, cell.gates.bias, padding=1).split(K, 1)
    r, u = torch.sigmoid(norm(r, cell.reset_norm)), torch.sigmoid(norm(u, cell.update_norm))
    o = F.conv2d(torch.cat((x, r * h), 1), cell.candidate.weight, cell.candidate.bias, padding=1)
    o = torch.tanh(norm(o, cell.candidate_norm))
    torch.testing.assert_close(cell(x, h), u * h + (1 - u) * o if gate_norm else (1 - u) * h + u * o)


def small_resnet():
    return ResNet(Bottleneck, (1, 2, 1, 1), channels=(8, 16, 16, 16), num_classes=7)


@pytest.mark.parametrize("variant", ["convlstm", "convgru"])
@pytest.mark.parametrize("reading", ["paper", "published"])
def test_cells_attach_to_a_plain_resnet_and_train(variant, reading):
    """Every parameter gets a gradient. The LSTM's is not zero, although a hard sigmoid is flat beyond its ends."""
    model = interlayer.attach(timm.create_model("resnet18", num_classes=5), "rla", variant=variant, reading=reading)
    model.train()(torch.randn(2, 3, 64, 64)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()] == []
    cells = {name: p.grad for name, p in model.named_parameters() if ".recurrent." in name}
    assert cells
    assert [name for name, grad in cells.items() if not grad.any()] == []


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("convlstm", {"gate_activation": "sigmoid"}),
        ("convlstm", {"forget_bias": 0.0}),
        ("convlstm", {"forget_bias": 2}),
        ("convlstm", {"cell_bias": False}),
        ("convlstm", {"cell_norm": False}),
        ("convgru", {"gate_activation": "hard_sigmoid"}),
        ("convgru", {"gate_norm": True}),
    ],
)
def test_every_option_of_a_cell_changes_the_logits(variant, options):
    image, logits = torch.randn(2, 3, 64, 64), []
    for given in ({}, options):
        torch.manual_seed(0)
        logits.append(interlayer.attach(small_resnet(), "rla", variant=variant, **given).eval()(image))
    assert not torch.allclose(*logits, atol=1e-6)


def test_the_default_of_the_lstm_is_kerass_cell_and_the_published_one_has_none_of_it():
    keras = interlayer.attach(small_resnet(), "rla", variant="convlstm", state_channels=K).rla.stages[0].recurrent[0]
    assert [part.unique().tolist() for part in keras.gates.bias.split(K)] == [[0], [1], [0], [0]]
    assert keras.activated(torch.tensor([-2.5, -1.0, 0.0, 2.5])).tolist() == pytest.approx([0, 0.3, 0.5, 1])
    options = {"variant": "convlstm", "reading": "published"}
    published = interlayer.attach(small_resnet(), "rla", **options).rla.stages[0].recurrent[0]
    assert published.gates.bias is None
    assert published.activated(torch.tensor(-2.5)) == pytest.approx(torch.sigmoid(torch.tensor(-2.5)).item())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gate_activation": "sigmoid"}, "gate_activation is defined for cell='convlstm' and 'convgru'"),
        ({"variant": "convlstm", "gate_activation": "relu"}, "gate_activation must be 'hard_sigmoid' or 'sigmoid'"),
        ({"variant": "convgru", "forget_bias": 1.0}, "forget_bias is defined for cell='convlstm' with cell_bias=True"),
        ({"variant": "convlstm", "cell_bias": False, "forget_bias": 1.0}, "forget_bias is defined for"),
        ({"variant": "convlstm", "forget_bias": "one"}, "forget_bias must be a number, got 'one'"),
        ({"variant": "convlstm", "gate_norm": True}, "gate_norm=True is defined for cell='convgru'"),
    ],
)
def test_options_that_would_change_nothing_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        interlayer.attach(small_resnet(), "rla", **options)


def test_weights_of_earlier_versions_keep_their_sigmoids(tmp_path):
    """They have no tensor that records hard sigmoids. With those they would compute another function without a word."""
    torch.manual_seed(1)
    earlier = interlayer.attach(small_resnet(), "rla", variant="convlstm", gate_activation="sigmoid").eval()
    assert not any("hard_gates" in name for name in earlier.state_dict())
    path, image = tmp_path / "earlier.safetensors", torch.randn(2, 3, 64, 64)
    interlayer.save_weights(earlier, path)
    model = interlayer.attach(small_resnet(), "rla", variant="convlstm").eval()
    interlayer.load_weights(model, path)
    torch.testing.assert_close(model(image), earlier(image))
    other = interlayer.attach(small_resnet(), "rla", variant="convlstm").eval()
    other.load_state_dict(earlier.state_dict())
    torch.testing.assert_close(other(image), earlier(image))
    today = interlayer.attach(small_resnet(), "rla", variant="convlstm").eval()
    earlier.load_state_dict(today.state_dict())
    torch.testing.assert_close(earlier(image), today(image))


def test_weights_that_do_not_fit_leave_the_gates_as_they_are(tmp_path):
    """Half of the function of the network would be that of a file that was refused."""
    earlier = interlayer.attach(small_resnet(), "rla", variant="convlstm", gate_activation="sigmoid")
    interlayer.save_weights(earlier, tmp_path / "earlier.safetensors")
    wider = small_resnet()
    wider.reset_classifier(9)
    model = interlayer.attach(wider, "rla", variant="convlstm").eval()
    image = torch.randn(2, 3, 64, 64)
    expected = model(image)
    with pytest.raises(ValueError, match="does not fit the model"):
        interlayer.load_weights(model, tmp_path / "earlier.safetensors")
    assert torch.equal(model(image), expected)
