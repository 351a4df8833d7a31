"""Tests of transformers whose layer attention reads the tokens where they lie."""

import copy

import pytest
import torch
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch._dynamo.backends.debugging import aot_eager

import interlayer
from interlayer import backend
from interlayer.ops._triton import base_tokens, light_tokens

IMAGES = torch.randn(2, 3, 12, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def vit(depth=2, **options):
    """A ViT with a grid of 3 x 5 patch tokens."""
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=(12, 20), patch_size=4, embed_dim=12, depth=depth, num_heads=2, num_classes=3, **options
    ).double()


def swin():
    """A Swin transformer with maps [B, H, W, C]."""
    torch.manual_seed(0)
    return SwinTransformer(
        img_size=(12, 20), patch_size=4, window_size=3, embed_dim=8, depths=(2,), num_heads=(2,), num_classes=3
    ).double()


def results(model, name, *, eval_mode=True):
    """Logits and gradients in training, and logits in eval mode."""
    model = copy.deepcopy(model).train()
    with backend(name):
        torch.manual_seed(2)  # of stochastic depth
        logits = model(IMAGES)
        logits.square().sum().backward()
        found = {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
        if eval_mode:
            with torch.no_grad():
                found["eval"] = model.eval()(IMAGES)
    return found | {"logits": logits.detach()}


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that were launched."""
    names = []
    run_kernel = light_tokens.run_kernel

    def record(kernel, *args, **constants):
        names.append(kernel.fn.__name__)
        return run_kernel(kernel, *args, **constants)

    monkeypatch.setattr(light_tokens, "run_kernel", record)
    monkeypatch.setattr(base_tokens, "run_kernel", record)
    return names


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for what, value in found.items():
        torch.testing.assert_close(value, expected[what], rtol=1e-8, atol=1e-8, msg=lambda m, what=what: f"{what}: {m}")


@pytest.mark.parametrize(
    ("make", "mechanism", "options"),
    [
        (vit, "mrla_light", {"reading": "paper"}),
        pytest.param(vit, "mrla_light", {"reading": "published"}, marks=pytest.mark.slow),
        (
            lambda: vit(reg_tokens=2, drop_path_rate=0.5),
            "mrla_light",
            {"reading": "published", "drop_path": "backbone"},
        ),
        pytest.param(
            lambda: vit(class_token=False, global_pool="avg"),
            "mrla_light",
            {"attention": False},
            marks=pytest.mark.slow,
        ),
        pytest.param(swin, "mrla_light", {"reading": "published"}, marks=pytest.mark.slow),
        pytest.param(vit, "mrla_base", {"reading": "paper"}, marks=pytest.mark.slow),
        (swin, "mrla_base", {"reading": "published"}),
    ],
    ids=["paper", "published", "registers", "convolution", "swin", "base", "base-swin"],
)
def test_networks_compute_the_same_with_kernels(make, mechanism, options, launched):
    """Logits and every gradient equal those of the reference, in a ViT and in a network of [B, H, W, C] maps."""
    model = interlayer.attach(make(), mechanism, channels_per_head=4, **options)
    expected = results(model, "reference")
    assert not launched
    found = results(model, "triton")
    assert launched.count("attention_kernel") == 4, "two layers, in training and in eval mode"
    assert launched.count("norms_kernel") == 2
    assert_equal(found, expected)


def test_a_hook_on_a_norm_is_called():
    """A norm with a hook is run as a module, and its layer passes on the memory that the next layer reads."""
    model = interlayer.attach(vit(), "mrla_light", channels_per_head=4)
    expected = results(model, "reference", eval_mode=False)
    calls = []
    model.blocks[1].mrla.norm_previous.register_forward_hook(lambda *arguments: calls.append(arguments))
    assert_equal(results(model, "triton", eval_mode=False), expected)
    assert len(calls) == 1


def test_the_gates_are_passed_to_the_hooks(launched):
    """Analysis reads the gates, [B, heads, 1], from hooks on `scores`."""
    model = interlayer.attach(vit(), "mrla_light", channels_per_head=4)
    seen = {}
    for name in ("reference", "triton"):
        gates = seen.setdefault(name, [])
        handles = [
            block.mrla.scores.register_forward_hook(lambda _, args, __, gates=gates: gates.append(args[0]))
            for block in model.blocks
        ]
        with backend(name), torch.no_grad():
            model(IMAGES)
        for handle in handles:
            handle.remove()
    assert launched
    assert [gate.shape for gate in seen["triton"]] == [(2, 3, 1)] * 2
    for found, expected in zip(seen["triton"], seen["reference"], strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("mechanism", "operator"), [("mrla_light", "light_tokens"), ("mrla_base", "base_tokens")])
def test_a_compiled_network_contains_the_kernels(mechanism, operator):
    """torch.compile takes a layer as one operator, without a graph break, and computes the same."""
    depth = 3 if mechanism == "mrla_base" else 2  # gradients of values pass through two layers
    model = interlayer.attach(vit(depth), mechanism, channels_per_head=4)
    operators = []

    def count(graph, inputs):
        operators.append([node for node in graph.graph.nodes if f"interlayer.{operator}." in str(node.target)])
        return aot_eager(graph, inputs)

    expected = results(model, "reference")
    found = results(torch.compile(model, fullgraph=True, backend=count), "triton")
    assert [len(nodes) for nodes in operators] == [depth] * 2, "in training and in eval mode"
    assert_equal({name.replace("_orig_mod.", ""): value for name, value in found.items()}, expected)
