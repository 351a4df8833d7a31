"""Tests of parameter and FLOP counts, memory and timing."""

import pytest
import timm
import torch
from torch import nn

import interlayer  # noqa: F401
from interlayer.analysis import Setting, count_flops, count_parameters, measure
from interlayer.analysis.cost import count_flops_both_ways


def test_paper_convention_by_hand():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    model.append(nn.Linear(8, 4))
    convolution, norm, pool, linear = 8 * 16 * 16 * 27, 2 * 8 * 16 * 16, 8 * 16 * 16, 8 * 4
    assert count_flops(model, 16) == convolution + norm + pool + linear
    assert count_flops(model, 16, convention="torch") == convolution + linear


@pytest.mark.parametrize(
    ("name", "paper", "torchs"),
    [
        ("resnet50", 4.112, 4.089),
        ("resnet50_mrla_light", 4.178, 4.139),
        ("resnet101_mrla_light", 7.942, None),
        ("resnet152_mrla_light", 11.717, None),
    ],
)
def test_flops_of_the_papers_models(name, paper, torchs):
    with torch.device("meta"):
        model = timm.create_model(name)
    assert count_flops(model) / 1e9 == pytest.approx(paper, abs=1e-3)
    if torchs:
        assert count_flops(model, convention="torch") / 1e9 == pytest.approx(torchs, abs=1e-3)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    ("name", "attention", "total"),
    [
        # q k^T and the product with v, over 12 layers of 197 tokens and 192 channels
        ("deit_tiny_patch16_224", 12 * 2 * 197 * 197 * 192, 1.254),
        ("halo_50", None, 4.763),
        ("halonet50ts", None, 5.270),
    ],
)
def test_the_products_of_attention_are_counted_fused_or_not(name, attention, total, device):
    if device == "cpu" and attention is None:
        pytest.skip("local attention has no fused kernel on the CPU; its shapes are those of meta tensors")
    with torch.device(device):
        model = timm.create_model(name)
    by_layers, by_torch = count_flops_both_ways(model)
    assert by_torch / 1e9 == pytest.approx(total, abs=1e-3)
    if attention is not None:
        assert by_torch - by_layers == attention
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = False
        assert count_flops_both_ways(model) == (by_layers, by_torch), "unfused attention has the same products"


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "swinv2_tiny_window8_256", "eva02_tiny_patch14_224"])
def test_functions_called_with_keywords_are_counted(name):
    """In these models, timm passes weights to F.linear by keyword, and most FLOPs are those of linear layers."""
    with torch.device("meta"):
        model = timm.create_model(name)
    assert count_flops(model) > 0.8 * count_flops(model, convention="torch")


def test_layer_parameters_leave_out_what_belongs_to_no_layer():
    with torch.device("meta"):
        vit = timm.create_model("deit_tiny_patch16_224")
        efficientnet = timm.create_model("efficientnet_b0")
    assert count_parameters(vit) - count_parameters(vit, layers_only=True) == 192 + 197 * 192
    assert count_parameters(efficientnet) == count_parameters(efficientnet, layers_only=True)


def test_measured_memory_grows_with_what_is_kept():
    """The peak includes at least weights, gradients, momentum and the saved activations."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)), nn.ReLU())
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 256), model)
    weights = 4 * sum(p.numel() for p in model.parameters())
    small, large = (measure(model, Setting(batch, 16, steps=1)) for batch in (4, 4096))
    assert small.memory >= 3 * weights
    assert small.memory < 3.5 * weights
    kept = 4 * 4096 * (5 * 256)
    assert large.memory - small.memory > kept
    assert large.memory - small.memory < 3 * kept


def test_measure_reports_progress_and_leaves_sensible_figures():
    told = []
    cost = measure(timm.create_model("resnet10t", num_classes=5), Setting(2, 64, steps=2), told.append)
    assert told == ["counting", "warming up", "memory", "training step", "inference"]
    assert cost.train_seconds > cost.inference_seconds > 0
    assert cost.train_throughput == pytest.approx(2 / cost.train_seconds)
    assert cost.flops == count_flops(timm.create_model("resnet10t", num_classes=5), 64, convention="torch")
    assert cost.image_size == (64, 64)


def test_measure_in_low_precision_and_channels_last():
    cost = measure(
        timm.create_model("resnet10t", num_classes=5),
        Setting(2, 64, precision="bfloat16", channels_last=True, steps=1),
    )
    assert cost.memory > 0


@pytest.mark.parametrize(("device", "precision"), [("cpu", "float32"), ("cuda", "float16")])
def test_what_cannot_be_captured_is_said_before_anything_runs(device, precision):
    with pytest.raises(ValueError, match=f"on a GPU alone.*got {device} and {precision}"):
        measure(nn.Linear(1, 1), Setting(1, 8, device, precision, graph=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures on a GPU")
def test_captured_steps_train_as_others():
    """The graph includes the step of the optimizer and the updates of running statistics."""
    weights = []
    for steps in (1, 3):
        torch.manual_seed(0)
        model = timm.create_model("resnet10t", num_classes=5)
        cost = measure(model, Setting(2, 64, "cuda", "bfloat16", True, steps=steps, graph=True))
        assert 0 < cost.inference_seconds < cost.train_seconds
        assert model.bn1.num_batches_tracked == 3 + 1 + 1 + steps  # warm-up, memory, capture, replays
        weights.append(model.conv1[0].weight.detach().clone())
    assert not torch.equal(*weights)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures on a GPU")
def test_captured_steps_leave_no_memory_behind():
    """Such memory would count towards models measured later."""
    setting = Setting(2, 64, "cuda", "bfloat16", True, steps=1, graph=True)
    found = [measure(timm.create_model("resnet10t"), setting).memory for _ in range(4)]
    assert max(found[1:]) - min(found[1:]) < 4 * 2**20
