"""Tests that `interlayer convert` takes the files of the authors' programs."""

import pytest
import timm
import torch
from command_line import fails, run
from published_names import published_rla
from published_networks import PUBLISHED, difference, options, weights

import interlayer


@pytest.mark.parametrize(
    "fixture",
    ["dsrla_mobilenetv2_k32_eca"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("rlagru_resnet50", "rlav1p_resnet50", "resnet50_eca", "resnet50_se", "rlalstm_resnet50")
    ],
)
def test_the_command_line_converts_a_published_checkpoint(fixture, reference_folder, tmp_path):
    name = PUBLISHED[fixture]
    source, target = tmp_path / f"{fixture}.pth.tar", tmp_path / "converted.safetensors"
    state = weights(reference_folder, fixture)
    torch.save({"epoch": 119, "state_dict": {f"module.{key}": value for key, value in state.items()}}, source)
    result = run("convert", source, target, "--model", name)
    assert result.returncode == 0, result.stderr
    assert f"tensors of {name}" in result.stdout
    model = timm.create_model(name, **options(name)).double().eval()
    interlayer.load_weights(model, target)
    assert difference(model, reference_folder, fixture) < 1e-10


@pytest.mark.slow
def test_the_command_line_names_what_a_checkpoint_of_another_state_needs(tmp_path):
    model = timm.create_model(
        "mobilenetv2_eca_rla", reading="published", num_classes=3, attach_options={"state_channels": 12}
    )
    source, target = tmp_path / "k12.pth", tmp_path / "k12.safetensors"
    torch.save(published_rla(model), source)
    line = ("convert", source, target, "--model", "mobilenetv2_eca_rla")
    assert "has 12 channels, that of this model 32: build it with state_channels=12" in fails(*line)
    assert not target.exists()
    result = run(*line, "--option", "state_channels=12")
    assert result.returncode == 0, result.stderr
    interlayer.load_weights(model, target)
