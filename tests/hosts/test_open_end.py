"""Tests of blocks whose end is computed together with the attention after it."""

import copy

import pytest
import timm
import torch
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

import interlayer
from interlayer import backend, ops
from interlayer.hosts.finding import components


def network(block=BasicBlock, mechanism="mrla_light", *, reading="published", layers=(2, 1, 1, 1), **options):
    """A ResNet of small blocks with layer attention, in float64 and channels_last."""
    torch.manual_seed(0)
    model = ResNet(block, layers, channels=(8, 8, 8, 8), stem_width=8, num_classes=3, **options)
    interlayer.attach(model, mechanism, reading=reading, channels_per_head=4, drop_path=0.0, image_size=32)
    return model.double().to(memory_format=torch.channels_last)


IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def results(model, name):
    """Logits in training, gradients, buffers after it, and logits in eval mode."""
    model = copy.deepcopy(model).train()
    images = IMAGES.contiguous(memory_format=torch.channels_last)
    with backend(name):
        logits = model(images)
        logits.square().sum().backward()
        found = {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
        found |= {n: b.double() for n, b in model.named_buffers()}
        with torch.no_grad():
            found["eval"] = model.eval()(images)
    return found | {"logits": logits.detach()}


@pytest.fixture
def opened(monkeypatch):
    """Counts the blocks that left their end open."""
    calls = []
    run_open = components.run_open

    def count(block, x):
        calls.append(block)
        return run_open(block, x)

    monkeypatch.setattr(components, "run_open", count)
    return calls


@pytest.mark.parametrize(
    ("block", "mechanism", "reading"),
    [
        (BasicBlock, "mrla_light", "published"),
        pytest.param(Bottleneck, "mrla_light", "paper", marks=pytest.mark.slow),
        (BasicBlock, "mrla_base", "published"),
        pytest.param(Bottleneck, "mrla_base", "paper", marks=pytest.mark.slow),
    ],
)
def test_networks_compute_the_same_with_kernels(block, mechanism, reading, opened):
    """Logits, every gradient and all running statistics equal those of the unchanged blocks."""
    model = network(block, mechanism, reading=reading)
    expected = results(model, "reference")
    assert not opened, "without a kernel blocks run unchanged"
    found = results(model, "triton")
    assert len(opened) == 10, "five blocks, in training and in eval mode"
    for what, value in found.items():
        torch.testing.assert_close(value, expected[what], rtol=1e-8, atol=1e-8, msg=lambda m, what=what: f"{what}: {m}")


@pytest.mark.parametrize(
    ("block", "mechanism", "reading", "batches"),
    [
        pytest.param(BasicBlock, "mrla_light", "published", (2,), marks=pytest.mark.slow),
        pytest.param(Bottleneck, "mrla_light", "paper", (2,), marks=pytest.mark.slow),
        pytest.param(BasicBlock, "mrla_light", "paper", (2, 3, 5), marks=pytest.mark.slow),
        (BasicBlock, "mrla_base", "published", (2,)),
        pytest.param(Bottleneck, "mrla_base", "paper", (2,), marks=pytest.mark.slow),
        pytest.param(BasicBlock, "mrla_base", "paper", (2, 3, 5), marks=pytest.mark.slow),
    ],
)
def test_compiled_networks_use_the_kernels(block, mechanism, reading, batches):
    """One graph for all batch sizes has an operator for each block, and trains as the kernels do without compiling."""
    layers = (3, 1, 1, 1) if mechanism == "mrla_base" else (2, 1, 1, 1)  # gradients of values pass through two layers
    model = network(block, mechanism, reading=reading, layers=layers)
    compiled = copy.deepcopy(model)
    operator = {"mrla_light": "light_layer", "mrla_base": "base_layer"}[mechanism]
    operators = []

    def compile_graph(graph_module, inputs):
        operators.append([n for n in graph_module.graph.nodes if f"interlayer.{operator}." in str(n.target)])
        return aot_eager(graph_module, inputs)

    function = torch.compile(compiled, backend=compile_graph, fullgraph=True)
    for batch in batches:
        images = IMAGES[:1, :, :16, :16].expand(batch, -1, -1, -1) * torch.arange(1, batch + 1)[:, None, None, None]
        images = images.contiguous(memory_format=torch.channels_last)
        if len(batches) > 1:
            torch._dynamo.mark_dynamic(images, 0)
        with backend("triton"):
            model(images).square().sum().backward()
            function(images).square().sum().backward()
    assert [len(found) for found in operators] == [sum(layers)]
    expected = dict(model.named_buffers()) | {n: p.grad for n, p in model.named_parameters()}
    found = dict(compiled.named_buffers()) | {n: p.grad for n, p in compiled.named_parameters()}
    for what, value in found.items():
        torch.testing.assert_close(value, expected[what], rtol=1e-8, atol=1e-8, msg=lambda m, what=what: f"{what}: {m}")


def test_blocks_with_another_end_are_left_alone():
    """Squeeze-and-excitation, stochastic depth, other activations and hooks run as timm runs them."""
    block = timm.create_model("resnet18").layer1[0]
    assert components.opens(block)
    assert not components.opens(timm.create_model("seresnet18").layer1[0])
    assert not components.opens(timm.create_model("resnet18", drop_path_rate=0.5).layer4[1])
    assert not components.opens(timm.create_model("resnet18", act_layer="silu").layer1[0])
    assert not components.opens(timm.create_model("resnet18", norm_layer=nn.SyncBatchNorm).layer1[0])
    assert not components.opens(timm.create_model("convnext_atto").stages[0].blocks[0])
    for module in (block.bn2, block.act2):
        handle = module.register_forward_hook(lambda *arguments: None)
        assert not components.opens(block)
        handle.remove()
    assert components.opens(block)


def test_two_mechanisms_leave_the_block_whole(opened):
    """ECA changes the branch inside the block, so that its end cannot be left to the attention."""
    model = interlayer.attach(network(), "eca")
    images = IMAGES[:1].contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), backend("reference"):
        expected = model.eval()(images)
    with torch.no_grad(), backend("triton"):
        assert ops.supports_open_end(images)
        assert not ops.supports_open_end(images.contiguous())
        torch.testing.assert_close(model(images), expected)
    assert not opened


def test_projected_shortcuts_are_not_saved(monkeypatch):
    """They would take memory that the plain network does not need, which saves only the input of their norm."""
    shortcuts, saved = [], []
    normalize = ops.normalize_shortcut

    def record(x, norm):
        shortcut, table = normalize(x, norm)
        shortcuts.append(shortcut)
        return shortcut, table

    monkeypatch.setattr(ops, "normalize_shortcut", record)
    model = network()
    with backend("triton"), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(IMAGES.contiguous(memory_format=torch.channels_last))
    assert len(shortcuts) == 4
    places = {tensor.data_ptr() for tensor in saved}
    assert not any(shortcut.data_ptr() in places for shortcut in shortcuts)
