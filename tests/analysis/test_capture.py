"""Tests that captured values are those of the network, and that capturing leaves nothing on it."""

import pytest
import timm
import torch
from torch import nn

import interlayer
from interlayer.analysis import capture, hooked

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
HOOKS += ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks_always_called")


def count_hooks(model):
    return {name: [len(getattr(module, kind)) for kind in HOOKS] for name, module in model.named_modules()}


@pytest.fixture(scope="module")
def resnet():
    torch.manual_seed(0)
    return timm.create_model("resnet10t", num_classes=5).eval()


def named(model, *kinds):
    return [name for name, module in model.named_modules() if name and (not kinds or isinstance(module, kinds))]


@pytest.mark.parametrize("of", ["output", "input"])
@pytest.mark.parametrize("detach", [True, False])
def test_no_hook_stays(resnet, of, detach):
    """A hook of one's own stays, those of the capture do not, also when the network raises."""
    own = resnet.layer1.register_forward_hook(lambda *args: None)
    before = count_hooks(resnet)
    with capture(resnet, named(resnet), of=of, detach=detach) as captured:
        resnet(IMAGES)
    assert len(captured) > 20
    assert count_hooks(resnet) == before
    with pytest.raises(RuntimeError, match="channels"), capture(resnet, named(resnet), of=of, detach=detach):
        resnet(IMAGES[:, :1])
    assert count_hooks(resnet) == before
    with (
        pytest.raises(ZeroDivisionError),
        hooked(resnet, before=dict.fromkeys(resnet.modules(), lambda *a: 1 / 0)),
    ):
        resnet(IMAGES)
    assert count_hooks(resnet) == before
    own.remove()


def test_outputs_and_inputs_are_those_of_the_modules(resnet):
    with capture(resnet, ["layer2", "fc"]) as outputs, capture(resnet, ["layer3"], of="input") as inputs:
        logits = resnet(IMAGES)
    assert list(outputs) == ["layer2", "fc"]
    assert torch.equal(outputs["fc"][0], logits)
    assert torch.equal(outputs["layer2"][0], inputs["layer3"][0])
    assert not outputs["layer2"][0].requires_grad


@pytest.mark.parametrize("detach", [True, False])
def test_values_that_the_network_overwrites_are_kept(resnet, detach):
    """ReLUs and residual sums of timm's ResNets are computed in place, over the outputs of norms."""
    norms = named(resnet, nn.BatchNorm2d)
    with capture(resnet, norms, detach=detach) as outputs, capture(resnet, norms, of="input", detach=detach) as inputs:
        logits = resnet(IMAGES)
    assert outputs.keys() == set(norms)
    for name in norms:
        norm = resnet.get_submodule(name)
        expected = nn.functional.batch_norm(
            inputs[name][0], norm.running_mean, norm.running_var, norm.weight, norm.bias
        )
        torch.testing.assert_close(outputs[name][0], expected, msg=lambda text, name=name: f"{name}: {text}")
    assert torch.equal(logits, resnet(IMAGES)), "capturing changes no result"


def test_gradients_with_respect_to_captured_values(resnet):
    """The gradient of a logit at the features before pooling is the classifier's weight over the number of pixels."""
    with capture(resnet, ["layer4"], detach=False) as captured:
        logits = resnet(IMAGES)
    (features,) = captured["layer4"]
    (gradient,) = torch.autograd.grad(logits[:, 3].sum(), features)
    expected = resnet.fc.weight[3] / (features.shape[2] * features.shape[3])
    torch.testing.assert_close(gradient, expected[None, :, None, None].expand_as(features))


def test_a_module_called_twice_gives_two_values():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.alias = self.layer

        def forward(self, x):
            return self.layer(input=self.layer(x))

    model, x = Twice(), torch.randn(3, 2)
    with capture(model, ["layer"]) as outputs, capture(model, ["layer", "alias"], of="input") as inputs:
        result = model(x)
        model(result)
    assert len(outputs["layer"]) == 4
    assert torch.equal(outputs["layer"][1], result)
    assert torch.equal(inputs["layer"][0], x)
    assert torch.equal(inputs["layer"][1], outputs["layer"][0]), "a keyword argument is an input too"
    assert torch.equal(inputs["layer"][2], result)
    assert len(inputs["alias"]) == 4, "a module of two names has values under both"


def test_nested_captures_do_not_disturb_each_other(resnet):
    before = count_hooks(resnet)
    with capture(resnet, ["layer2"]) as outer:
        with capture(resnet, ["layer2", "layer3"]) as inner:
            resnet(IMAGES)
        resnet(IMAGES)
    assert [len(values) for values in outer.values()] == [2]
    assert [len(values) for values in inner.values()] == [1, 1]
    assert count_hooks(resnet) == before


def test_reduce_keeps_its_result_alone(resnet):
    with capture(resnet, ["layer2"], reduce=lambda x: x.mean((2, 3))) as captured, capture(resnet, ["layer2"]) as whole:
        resnet(IMAGES)
        resnet(IMAGES[:1])
    assert [value.shape for value in captured["layer2"]] == [(2, 128), (1, 128)]
    torch.testing.assert_close(captured["layer2"][0], whole["layer2"][0].mean((2, 3)))


def test_compiled_networks_run_eagerly_inside():
    """Compiled code does not call new hooks: without eager execution, nothing would be captured."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    x = torch.randn(3, 4)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    with capture(compiled, ["0"]) as captured:
        compiled(x)
    torch.testing.assert_close(captured["0"][0], model[0](x))
    model.compile(backend="eager")
    model(x)
    with capture(model, ["0"]) as captured:
        model(x)
    assert len(captured["0"]) == 1


def test_attached_blocks_give_plain_tensors():
    """An attached block returns its output with memories; the captured value is the output alone."""
    model = interlayer.attach(timm.create_model("resnet10t", num_classes=5), "mrla_base", image_size=64).eval()
    with capture(model, ["layer1.0"]) as captured:
        logits = model(IMAGES)
    assert isinstance(captured["layer1.0"][0], torch.Tensor)
    with capture(model, ["layer1.0"], detach=False) as captured:
        torch.testing.assert_close(model(IMAGES), logits)
    assert captured["layer1.0"][0].requires_grad


def test_unknown_names_are_refused(resnet):
    message = r"has no module 'layer9': expected a name of model.named_modules\(\), such as conv1, bn1"
    with pytest.raises(ValueError, match=message), capture(resnet, ["layer9"]):
        pass
    message = "of must be 'output' or 'input', got 'gradient'"
    with pytest.raises(ValueError, match=message), capture(resnet, ["fc"], of="gradient"):
        pass
