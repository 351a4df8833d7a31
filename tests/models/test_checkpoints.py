"""Tests of the conversion of published checkpoints, and of reading and writing files."""

import errno
import importlib.util
import json
import os
import re

import numpy as np
import pytest
import timm
import torch
from torch import nn

import interlayer
from interlayer.hosts import attached_blocks, entry_of
from interlayer.models import checkpoints

PUBLISHED = {
    "mrla_resnet50_light": "resnet50_mrla_light",
    "mrla_resnet50_base": "resnet50_mrla_base",
    "mrla_deit_tiny_light": "deit_tiny_mrla_light",
    "mrla_deit_tiny_base": "deit_tiny_mrla_base",
    "rla_resnet50": "resnet50_rla",
    "rlav3_resnet50": "resnet50_rla_v3",
    "rlaus_resnet50": "resnet50_rla_unshared",
    "rlalstm_resnet50": "resnet50_rla_convlstm",
    "dsrla_mobilenetv2_k32": "mobilenetv2_rla",
    "rest_lite": "rest_lite",
    "rest_base": "rest_base",
}
OURS_TO_PUBLISHED = (
    (".mrla.decay", ".mrla.lambda_t"),
    (".mrla.query.", ".mrla.mrla.Wq."),
    (".mrla.key.", ".mrla.mrla.Wk."),
    (".mrla.value.", ".mrla.mrla.Wv."),
    (".mrla.norm.", ".bn_mrla."),
    (".mrla.norm_in.", ".mrla.normx."),
    (".mrla.norm_previous.", ".mrla.normo."),
)


def published_names(state_dict):
    """Returns a state dict with the names of the authors' program."""
    renamed = {}
    for name, tensor in state_dict.items():
        for ours, theirs in OURS_TO_PUBLISHED:
            name = name.replace(ours, theirs)
        renamed[name] = tensor
    return renamed


@pytest.mark.parametrize(("fixture", "name"), PUBLISHED.items(), ids=PUBLISHED.values())
def test_published_models_give_their_own_logits(fixture, name, reference_folder):
    """Converted deterministic weights give the result of the authors' program in float64."""
    spec = importlib.util.spec_from_file_location("fill", reference_folder / "fill.py")
    fill = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fill)
    description = json.loads((reference_folder / f"{fixture}.json").read_text())
    published = {k: torch.as_tensor(fill.reference_tensor(k, tuple(shape))) for k, shape in description["state"]}
    options = {} if name.startswith("rest_") else {"reading": "published"}
    model = timm.create_model(name, **options).double().eval()
    model.load_state_dict(interlayer.convert_checkpoint(published, model))
    assert sum(p.numel() for p in model.parameters()) == description["parameters"]
    with np.load(reference_folder / f"{fixture}.npz") as file:
        expected = torch.as_tensor(next(iter(file.values())))
    with torch.no_grad():
        logits = model(torch.as_tensor(fill.reference_input(tuple(description["input_shape"]))))
    difference = float((logits - expected).abs().max() / expected.abs().max())
    print(f"{name}: largest relative difference {difference:.1e}")
    assert difference < 1e-9


@pytest.mark.parametrize(
    "name",
    [
        "resnet18_mrla_light",
        "resnet34_mrla_base",
        "efficientnet_b0_mrla_light",
        "deit_small_mrla_base",
        "pvt_v2_b0_mrla_light",
        "ceit_tiny_mrla_light",
    ],
)
def test_other_sizes_and_families_convert_too(name):
    model = timm.create_model(name, reading="published", num_classes=4)
    state = published_names(model.state_dict())
    if "resnet" in name and "base" in name:
        state = {k.replace("layer", "stages.") if k.startswith("layer") else k: v for k, v in state.items()}
        state = {_stage_from_zero(k): v for k, v in state.items()}
    wrapped = {"epoch": 3, "state_dict": {f"module.{k}": v for k, v in state.items()}}
    converted = interlayer.convert_checkpoint(wrapped, model)
    assert converted.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.equal(converted[key], value)


def as_published_rla(model):
    """Returns the state dict of an RLA model with the authors' names and weights of blocks for [x, h]."""
    state = dict(model.state_dict())
    mobile = "conv_head.weight" in state
    published = {}
    places = {name: entry_of(block, "rla").place for name, block in attached_blocks(model)}
    for name, place in places.items():
        prefix = f"rla.stages.{place.stage}.exchanges.{place.index}."
        if mobile:
            expanded = f"{name}.conv_pwl.weight" in state
            norm, last = ("bn2", "conv_pwl") if expanded else ("bn1", "conv_pw")
            joins = {"conv_dw": ("0.", 0), norm: ("1.", 0), last: ("3.", 1)}
        else:
            joins = {"conv1": ("", 1)}
        for ours, (part, dim) in joins.items():
            for key in [k for k in state if k.startswith(prefix + part) and "." not in k.removeprefix(prefix + part)]:
                other, target = state.pop(key), f"{name}.{ours}.{key.rpartition('.')[2]}"
                if other.dim():
                    state[target] = torch.cat((state[target], other), dim)
    widths = [0]
    for stage in model.rla.stages:
        widths.append(widths[-1] + len(stage.compress))
    inverted = {
        "conv_pw": "conv1x1.0",
        "bn1": "conv1x1.1",
        "conv_dw": "conv.0.0",
        "bn2": "conv.0.1",
        "conv_pwl": "conv.1",
        "bn3": "conv.2",
        "eca_gate.attention": "conv.3",
    }
    first = {
        "conv_dw": "conv.0.0",
        "bn1": "conv.0.1",
        "conv_pw": "conv.1",
        "bn2": "conv.2",
        "eca_gate.attention": "conv.3",
    }
    shared = model.rla.stages[0].shared
    by_place = {(place.stage, place.index): name for name, place in places.items()}
    for name, tensor in state.items():
        if found := re.match(r"(blocks|layer)\.?(\d+)\.(\d+)\.(.+)$", name):
            stage = int(found[2]) - (0 if mobile else 1)
            inner = found[4]
            if mobile:
                names = first if stage == 0 else inverted
                ours = next(key for key in names if inner.startswith(f"{key}."))
                inner = names[ours] + inner.removeprefix(ours)
            else:
                inner = inner.replace("se.conv", "eca.conv").replace("se.fc1", "se.fc.0").replace("se.fc2", "se.fc.2")
            name = f"stages.{stage}.{found[3]}.{inner}"
        elif found := re.match(r"rla\.stages\.(\d+)\.(\w+)\.(\d+)\.(.+)$", name):
            stage, what, index, rest = int(found[1]), found[2], int(found[3]), found[4]
            block = by_place.get((stage, index), "")
            there = re.sub(r"blocks\.|layer", "", block).split(".")
            if not shared:
                inner = {"compress": "conv_out", "recurrent": "recurrent_conv", "norms": "bn_rla"}[what]
                name = f"stages.{int(there[0]) - 1}.{there[1]}.{inner}.{rest}"
            elif what == "compress":
                name = f"conv_outs.{widths[stage] + index}.{rest}"
            elif what == "recurrent":
                rest = rest.replace("gates", "conv" if model.rla.cell == "convlstm" else "conv_gates")
                name = f"recurrent_convs.{stage}.{rest.replace('candidate', 'conv_can')}"
            else:
                name = f"stage_bns.{int(there[0]) - (0 if mobile else 1)}.{there[1]}.{rest}"
        elif name.startswith("rla.recurrent."):
            published |= {f"recurrent_dsconvs.{i}.weight": tensor for i in range(5)}
            continue
        elif name.startswith("rla.norm."):
            name = name.replace("rla.norm", "bn2")
        elif mobile:
            if name == "rla.join.weight":
                continue
            if name == "conv_head.weight":
                tensor = torch.cat((tensor, state["rla.join.weight"]), 1)
            renames = {"conv_stem": "conv1.0", "bn1": "conv1.1", "conv_head": "conv2.0", "bn2": "conv2.1"}
            module, _, kind = name.rpartition(".")
            name = f"{renames.get(module, 'classifier.1')}.{kind}"
        published[name] = tensor
    return published


@pytest.mark.parametrize(
    ("name", "reading"),
    [
        ("resnet50_rla_no_exchange", "published"),
        ("resnet50_rla_convgru", "published"),
        ("resnet50_eca_rla", "published"),
        ("mobilenetv2_eca_rla", "published"),
        *(
            pytest.param(name, "published", marks=pytest.mark.slow)
            for name in (
                "resnet101_rla",
                "resnet50_se_rla",
                *(f"resnet50_rla_{v}" for v in ("v2", "v4", "v5", "v6", "postact")),
            )
        ),
    ],
)
def test_other_published_rla_models_convert(name, reading):
    """Every tensor is converted: weights for [x, h] are split, and those of the state belong to their stage."""
    model = timm.create_model(name, reading=reading, num_classes=3)
    expected = {k: torch.randn_like(v) if v.is_floating_point() else v for k, v in model.state_dict().items()}
    nn.Module.load_state_dict(model, expected)
    published = as_published_rla(model)
    converted = interlayer.convert_checkpoint({"state_dict": published}, model)
    assert list(converted) == list(expected)
    for key, value in expected.items():
        assert torch.equal(converted[key], value), key
    with pytest.raises(interlayer.CheckpointError, match=r"unknown: conv_outs\.9\.weight"):
        interlayer.convert_checkpoint({**published, "conv_outs.9.weight": torch.zeros(1)}, model)
    with pytest.raises(interlayer.CheckpointError, match="reading='published'"):
        interlayer.convert_checkpoint(published, timm.create_model(name, num_classes=3))


def _stage_from_zero(name):
    if not name.startswith("stages."):
        return name
    _, number, rest = name.split(".", 2)
    return f"stages.{int(number) - 1}.{rest}"


def test_lambda_is_reshaped_and_old_batch_norms_are_completed():
    model = timm.create_model("resnet18_mrla_light", reading="published", num_classes=4)
    state = {
        k: v[:, None, None] if k.endswith("lambda_t") else v
        for k, v in published_names(model.state_dict()).items()
        if not k.endswith("num_batches_tracked")
    }
    model.load_state_dict(interlayer.convert_checkpoint(state, model))


def test_a_published_checkpoint_is_refused_by_the_papers_reading():
    model = timm.create_model("resnet18_mrla_light", num_classes=4)
    with pytest.raises(interlayer.CheckpointError, match="build it with reading='published'"):
        interlayer.convert_checkpoint(published_names(model.state_dict()), model)


def test_only_axes_of_length_one_are_reshaped():
    model = timm.create_model("resnet18_mrla_light", reading="published", num_classes=4)
    state = published_names(model.state_dict())
    state["fc.weight"] = state["fc.weight"].T
    with pytest.raises(interlayer.CheckpointError, match=r"fc.weight \(512, 4\), expected \(4, 512\)"):
        interlayer.convert_checkpoint(state, model)


def test_a_checkpoint_of_ours_is_not_converted_to_another_reading(tmp_path):
    paper = timm.create_model("resnet18_mrla_light", num_classes=4)
    published = timm.create_model("resnet18_mrla_light", num_classes=4, reading="published")
    with pytest.raises(interlayer.CheckpointError, match="was saved with reading=paper"):
        interlayer.convert_checkpoint(paper.state_dict(), published)
    torch.save({"model": {"state_dict": torch.nn.DataParallel(paper).state_dict()}}, tmp_path / "parallel.pth")
    with pytest.raises(interlayer.CheckpointError, match=r"layer1.0.mrla was saved with reading=paper"):
        interlayer.load_weights(published, tmp_path / "parallel.pth")
    interlayer.load_weights(paper, tmp_path / "parallel.pth")


def test_another_cut_into_stages_is_refused(tmp_path):
    def vit(stages):
        model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=6, num_classes=4)
        return interlayer.attach(model, "mrla_base", stages=stages)

    interlayer.save_weights(vit((2, 2, 2)), tmp_path / "weights.safetensors")
    with pytest.raises(interlayer.CheckpointError, match=r"blocks.2.mrla was saved with layer=0, this model"):
        interlayer.load_weights(vit((3, 3)), tmp_path / "weights.safetensors")


def test_what_does_not_fit_is_listed():
    model = timm.create_model("resnet18_mrla_light", reading="published", num_classes=4)
    state = published_names(model.state_dict())
    state["strange.weight"] = state.pop("conv1.weight")
    state["fc.bias"] = torch.zeros(9)
    with pytest.raises(interlayer.CheckpointError) as raised:
        interlayer.convert_checkpoint(state, model)
    for part in ("missing: conv1.weight", "unknown: strange.weight", "fc.bias (9,), expected (4,)"):
        assert part in str(raised.value)
    with pytest.raises(interlayer.CheckpointError, match="holds no tensors"):
        interlayer.convert_checkpoint({"epoch": 1}, model)


@pytest.fixture
def model():
    return timm.create_model("resnet18_mrla_light", num_classes=4)


def test_saved_weights_load_again(model, tmp_path):
    path = tmp_path / "weights.safetensors"
    interlayer.save_weights(model, path)
    other = timm.create_model("resnet18_mrla_light", num_classes=4)
    interlayer.load_weights(other, path)
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in model.state_dict().items())
    assert [p.name for p in tmp_path.iterdir()] == ["weights.safetensors"], "no temporary file may stay"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"reading": "published"}, "was saved with reading=paper, this model has reading=published"),
        ({"attach_options": {"channels_per_head": 16}}, "was saved with channels_per_head=32, this model has"),
    ],
)
def test_a_file_of_another_reading_is_refused(model, options, sentence, tmp_path):
    path = tmp_path / "weights.safetensors"
    interlayer.save_weights(model, path)
    other = timm.create_model("resnet18_mrla_light", num_classes=4, **options)
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(interlayer.CheckpointError, match=sentence):
        interlayer.load_weights(other, path)
    assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    with pytest.raises((interlayer.CheckpointError, RuntimeError), match=sentence):
        interlayer.load_weights(other, tmp_path / "weights.pth")


def test_plain_state_dicts_load_too(model, tmp_path):
    torch.save({"state_dict": model.state_dict()}, tmp_path / "wrapped.pth")
    other = timm.create_model("resnet18_mrla_light", num_classes=4)
    interlayer.load_weights(other, tmp_path / "wrapped.pth")
    assert torch.equal(other.conv1.weight, model.conv1.weight)


def test_unreadable_files_are_named(model, tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / "noise.pth").write_bytes(b"not a checkpoint")
    (tmp_path / "noise.safetensors").write_bytes(b"not a checkpoint")
    torch.save({"state_dict": Harmful()}, tmp_path / "harmful.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    for name in ("noise.pth", "noise.safetensors", "harmful.pth", "list.pth", "absent.pth"):
        with pytest.raises(interlayer.CheckpointError, match=name):
            interlayer.load_weights(model, tmp_path / name)
    assert not (tmp_path / "ran").exists(), "code from the file was run"


def test_a_failed_write_leaves_the_old_file(model, tmp_path, monkeypatch):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"the last good one")

    def full_disk(tensors, file, metadata):
        with open(file, "wb") as out:
            out.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints.safetensors.torch, "save_file", full_disk)
    with pytest.raises(interlayer.CheckpointError, match="No space left on device"):
        interlayer.save_weights(model, path)
    assert path.read_bytes() == b"the last good one"
    assert [p.name for p in tmp_path.iterdir()] == ["weights.safetensors"]
    with pytest.raises(interlayer.CheckpointError, match="no such folder"):
        interlayer.save_weights(model, tmp_path / "absent" / "weights.safetensors")
    with pytest.raises(interlayer.CheckpointError, match=r"saved as \.safetensors, got 'weights.pth'"):
        interlayer.save_weights(model, tmp_path / "weights.pth")


class Executes:
    """An object whose loading would run code."""

    def __reduce__(self):
        return print, ("code of the checkpoint ran",)


def test_files_that_are_not_checkpoints_give_a_reason_and_no_dangerous_advice(tmp_path, capsys):
    torch.save({"state_dict": Executes()}, tmp_path / "code.pth")
    (tmp_path / "text.pth").write_text("hello")
    reasons = {"code.pth": r"it contains .*print, and loading", "text.pth": "is not a PyTorch file"}
    for name, reason in reasons.items():
        with pytest.raises(interlayer.CheckpointError, match=reason) as caught:
            interlayer.load_weights(torch.nn.Linear(1, 1), tmp_path / name)
        assert "weights_only=False" not in str(caught.value)
        assert "`False`" not in str(caught.value)
    with pytest.raises(interlayer.CheckpointError, match="is a folder, expected a"):
        interlayer.load_weights(torch.nn.Linear(1, 1), tmp_path)
    assert "ran" not in capsys.readouterr().out
