"""Tests of reading and writing checkpoint files, and of checkpoints that do not fit a network."""

import errno
import os

import pytest
import timm
import torch
from published_names import published_mrla

import interlayer
from interlayer.models import checkpoints


def test_lambda_is_reshaped_and_old_batch_norms_are_completed():
    model = timm.create_model("resnet18_mrla_light", reading="published", num_classes=4)
    state = {
        k: v[:, None, None] if k.endswith("lambda_t") else v
        for k, v in published_mrla(model.state_dict()).items()
        if not k.endswith("num_batches_tracked")
    }
    model.load_state_dict(interlayer.convert_checkpoint(state, model))


def test_a_published_checkpoint_is_refused_by_the_papers_reading():
    model = timm.create_model("resnet18_mrla_light", num_classes=4)
    with pytest.raises(interlayer.CheckpointError, match="build it with reading='published'"):
        interlayer.convert_checkpoint(published_mrla(model.state_dict()), model)


def test_only_axes_of_length_one_are_reshaped():
    model = timm.create_model("resnet18_mrla_light", reading="published", num_classes=4)
    state = published_mrla(model.state_dict())
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
    state = published_mrla(model.state_dict())
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
