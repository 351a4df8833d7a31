"""Tests of DenseNet and its variants with shared 1x1 convolutions."""

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F

import interlayer
from interlayer.analysis import count_parameters, plot_shared_weights, shared_weights
from interlayer.models.networks.densenet import DenseNetBC


def small(sharing):
    torch.manual_seed(0)
    return DenseNetBC(3, growth=4, sharing=sharing, num_classes=5).double()


@pytest.mark.parametrize(("name", "expected"), [("", 797_187), ("_shared_lag", 600_627), ("_shared_ordinal", 600_627)])
def test_parameters_are_those_of_table_1(name, expected):
    """The paper counts the running statistics of norms as parameters."""
    model = timm.create_model(f"densenet100_cifar{name}")
    statistics = sum(b.numel() for n, b in model.named_buffers() if "running" in n)
    assert count_parameters(model) + statistics == expected


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sharing", ["lag", "ordinal"])
def test_a_stage_is_equation_9_or_10(sharing, training):
    """Computes the equations layer by layer: slice l of the shared weights reads layer t - l, or layer l."""
    stage = small(sharing).stages[0].train(training)
    torch.nn.init.normal_(stage.shared.norm.bias)
    x0 = torch.randn(2, 11, 6, 6, dtype=torch.float64)
    outputs = []
    weight, norm = stage.shared.conv.weight, stage.shared.norm
    for t, layer in enumerate(stage.layers, start=1):
        inner = F.conv2d(
            F.relu(F.batch_norm(x0, None, None, layer.norm1.weight, layer.norm1.bias, True))
            if training
            else F.relu(layer.norm1(x0)),
            layer.conv1.weight,
        )
        for source in range(1, t):
            index = slice(4 * ((t - source if sharing == "lag" else source) - 1), None)
            index = slice(index.start, index.start + 4)
            statistics = (None, None) if training else (norm.running_mean[index], norm.running_var[index])
            y = F.batch_norm(outputs[source - 1], *statistics, norm.weight[index], norm.bias[index], training)
            inner = inner + F.conv2d(F.relu(y), weight[:, index])
        inner = (
            F.batch_norm(inner, None, None, layer.norm2.weight, layer.norm2.bias, True)
            if training
            else layer.norm2(inner)
        )
        outputs.append(F.conv2d(F.relu(inner), layer.conv2.weight, padding=1))
    torch.testing.assert_close(stage(x0), torch.cat((x0, *outputs), 1))


def test_without_sharing_it_is_a_densenet():
    model = small(None)
    stage = model.stages[0].eval()
    x0 = torch.randn(2, 11, 6, 6, dtype=torch.float64)
    features = [x0]
    for layer in stage.layers:
        inner = layer.conv1(F.relu(layer.norm1(torch.cat(features, 1))))
        features.append(layer.conv2(F.relu(layer.norm2(inner))))
    torch.testing.assert_close(stage(x0), torch.cat(features, 1))
    assert [info["num_chs"] for info in timm.create_model("densenet100_cifar").feature_info] == [219, 301, 342]
    with pytest.raises(ValueError, match="sharing must be 'lag', 'ordinal' or None, got 'both'"):
        small("both")


@pytest.mark.parametrize("sharing", [None, "lag", "ordinal"])
def test_every_parameter_gets_a_gradient(sharing):
    model = small(sharing)
    model(torch.randn(2, 3, 16, 16, dtype=torch.float64)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_files_tell_by_what_they_share(tmp_path):
    """Networks with equal tensors that are shared by lag or by ordinal compute different functions."""
    interlayer.save_weights(timm.create_model("densenet100_cifar_shared_lag"), tmp_path / "lag.safetensors")
    with pytest.raises(interlayer.CheckpointError, match="was saved with sharing=lag, this model has sharing=ordinal"):
        interlayer.load_weights(timm.create_model("densenet100_cifar_shared_ordinal"), tmp_path / "lag.safetensors")


def test_an_exponential_is_found():
    """Weights that decay as exp(-0.4 l) with the lag give this rate and an R² of one."""
    model = timm.create_model("densenet100_cifar_shared_lag")
    with torch.no_grad():
        for stage in model.stages:
            decay = torch.exp(-0.4 * torch.arange(1, 16)).repeat_interleave(12)
            sign = torch.randn_like(stage.shared.conv.weight).sign()
            stage.shared.conv.weight.copy_(sign * decay[None, :, None, None])
    stages = shared_weights(model.state_dict())
    assert [stage.stage for stage in stages] == [1, 2, 3]
    for stage in stages:
        assert stage.rate == pytest.approx(0.4, abs=1e-6)
        assert stage.r_squared == pytest.approx(1, abs=1e-9)
        np.testing.assert_allclose(stage.norms, stage.fitted, rtol=1e-5)
    figure = plot_shared_weights([("lag", stages), ("ordinal", stages)])
    assert [axes.get_title() for axes in figure.axes] == ["shared by lag", "shared by ordinal"]
    assert all(len(axes.lines) == 6 for axes in figure.axes)
    with pytest.raises(ValueError, match="has no shared 1x1 weights"):
        shared_weights(timm.create_model("densenet100_cifar").state_dict())


def test_gradient_checkpoints_and_frozen_norms():
    model = timm.create_model("densenet100_cifar_shared_lag", num_classes=3)
    model.set_grad_checkpointing()
    model.train()(torch.randn(2, 3, 16, 16)).sum().backward()
    shared = model.stages[0].shared
    shared.norm.eval()
    before = shared.norm.running_mean.clone()
    model(torch.randn(2, 3, 16, 16))
    assert torch.equal(shared.norm.running_mean, before), "a frozen norm must keep its statistics"


def test_weights_that_no_exponential_fits_are_shown_without_one():
    weight = torch.zeros(48, 180, 1, 1)
    weight[:, -12:] = 1
    (stage,) = shared_weights({"stages.0.shared.conv.weight": weight})
    assert np.isnan(stage.r_squared) or stage.r_squared <= 1
    (single,) = shared_weights({"stages.0.shared.conv.weight": torch.ones(4, 2, 1, 1)}, growth=2)
    assert np.isnan(single.rate)
    assert plot_shared_weights([("lag", [stage, single])])
