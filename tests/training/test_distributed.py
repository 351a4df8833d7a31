"""Several processes on the CPU, replicated or sharded, train, save and resume as a single process does."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import timm
import torch
from digit_images import save_digits
from test_trainer import VIT, assert_same_run, metrics, weights

from interlayer.models import save_weights
from interlayer.training import train


@pytest.fixture
def launch(tmp_path):
    """Returns a function that trains a recipe in two processes started by torchrun."""

    def run(recipe, folder, *arguments, expect=0, processes=2):
        path = tmp_path / f"{folder.name}.yaml"
        path.write_text(recipe.to_yaml())
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
            "-m", "interlayer", "train", "--recipe", str(path), "--output", str(folder), *arguments,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=_environment())
        assert done.returncode == expect, done.stderr[-3000:]
        return done

    return run


def _environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def without_randomness(small):
    """The network has no batch norm, and only the order of the images is random."""
    return small(
        model="vit_tiny_patch16_224", model_options=VIT, image_size=16, crop="none", validation=200, epochs=2, lr=0.01
    )


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_processes_train_as_one_with_the_same_batch(without_randomness, tmp_path, launch, accumulate):
    train(without_randomness, tmp_path / "one")
    launch(without_randomness.replace(accumulate=accumulate), tmp_path / "two")
    ours, theirs = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
    for row, other in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        for key in ("train_loss", "train_accuracy", "eval_loss", "eval_accuracy", "lr"):
            assert float(row[key]) == pytest.approx(float(other[key]), rel=1e-4, abs=0.01), key
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["processes"] == 2


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_sharded_network_trains_as_a_copied_one_and_resumes(without_randomness, tmp_path, launch, killed):
    """Compares FSDP with two processes with one process, and with itself killed after a checkpoint and resumed."""
    recipe = without_randomness.replace(sharding="fsdp", optimizer="adamw", lr=0.003)
    launch(recipe, tmp_path / "whole")
    if killed:
        launch_kill_and_resume(recipe, tmp_path, launch)
        assert_same_run(tmp_path / "whole", tmp_path / "cut")
        return
    train(recipe.replace(sharding="none"), tmp_path / "one")
    ours, theirs = weights(tmp_path / "one"), weights(tmp_path / "whole")
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)


def launch_kill_and_resume(recipe, tmp_path, launch):
    """Trains in two processes, kills both after a checkpoint in the middle of an epoch, and resumes."""
    path = tmp_path / "cut.yaml"
    path.write_text(recipe.replace(checkpoint_steps=3).to_yaml())
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "interlayer", "train", "--recipe", str(path), "--output", str(tmp_path / "cut"),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=_environment(), start_new_session=True
    )
    for _ in range(1200):
        if list((tmp_path / "cut" / "checkpoints").glob("step_000000003")):
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "cut" / "summary.json").exists(), "the run ended before it could be killed"
    launch(recipe.replace(checkpoint_steps=3), tmp_path / "cut", "--resume")


@pytest.mark.parametrize("resident", ["auto", pytest.param("no", marks=pytest.mark.slow)])
def test_odd_numbers_and_bad_images_keep_processes_together(small, tmp_path, launch, resident):
    """39 test images, and bad images in only one process: no process hangs, and every image is counted once."""
    save_digits(tmp_path / "data" / "train", 6)
    save_digits(tmp_path / "data" / "val", 4)
    next((tmp_path / "data" / "val" / "3").glob("*.png")).unlink()
    for name in ("a", "b"):
        (tmp_path / "data" / "train" / "0" / f"{name}.png").write_bytes(b"x")
    recipe = small(
        data=str(tmp_path / "data"), resident=resident, on_bad_image="skip", batch_size=20, accumulate=5, ema=0.5,
        eval_batch_size=8,
    )  # fmt: skip
    done = launch(recipe, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test"]["images"] == 39
    assert done.stderr.count("run: epoch 1/2") == 1, "only rank 0 prints the progress"
    assert done.stderr.count("a.png cannot be used") + done.stderr.count("a.png: ") == 1, done.stderr


@pytest.mark.slow
def test_processes_agree_on_a_folder_and_save_when_asked_to_stop(without_randomness, tmp_path):
    """Without --output, ranks choose different names. SIGTERM reaches them at different steps. Resuming is exact."""
    recipe = without_randomness.replace(epochs=30, validation=0, batch_size=64)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "interlayer", "train", "--recipe", str(tmp_path / "recipe.yaml"),
    ]  # fmt: skip
    options = {"cwd": tmp_path, "env": _environment(), "text": True, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **options)
    while "epoch 2/30" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    (folder,) = (tmp_path / "runs").iterdir()
    assert list((folder / "checkpoints").glob("step_*"))
    done = subprocess.run([*command, "--output", str(folder), "--resume"], timeout=120, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    done = subprocess.run([*command, "--output", str(tmp_path / "whole")], timeout=120, **options)
    assert_same_run(folder, tmp_path / "whole")


def test_more_processes_than_the_batch_can_be_cut_into_is_one_sentence(without_randomness, tmp_path, launch):
    done = launch(without_randomness.replace(batch_size=255), tmp_path / "run", expect=1)
    assert done.stderr.count("batch_size=255 cannot be cut into 2 processes") == 1, "only one rank prints the error"


@pytest.fixture
def fine_tuned(without_randomness, tmp_path):
    """The recipe of a run from trained weights with five classes, and the network they came from."""
    torch.manual_seed(0)
    start = timm.create_model("vit_tiny_patch16_224", num_classes=5, **VIT, img_size=16)
    save_weights(start, tmp_path / "start.safetensors")
    weights_file = str(tmp_path / "start.safetensors")
    return without_randomness.replace(weights=weights_file, new_lr_scale=3, layer_decay=0.8), start


@pytest.mark.slow
def test_replicas_freeze_and_unfreeze_together(fine_tuned, tmp_path, launch):
    """The first epoch trains only the new classifier; two processes end as one does, also if killed and resumed."""
    recipe = fine_tuned[0].replace(freeze_epochs=1)
    train(recipe, tmp_path / "one")
    launch(recipe, tmp_path / "two")
    launch_kill_and_resume(recipe, tmp_path, launch)
    ours, theirs = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
    assert not torch.equal(ours["blocks.0.attn.qkv.weight"], fine_tuned[1].blocks[0].attn.qkv.weight)
    assert_same_run(tmp_path / "two", tmp_path / "cut")


@pytest.mark.slow
def test_shards_have_the_learning_rates_of_their_groups(fine_tuned, tmp_path, launch):
    """Compares FSDP with two processes, killed and resumed, with one process."""
    recipe = fine_tuned[0].replace(optimizer="adamw", lr=0.003)
    train(recipe, tmp_path / "one")
    launch_kill_and_resume(recipe.replace(sharding="fsdp"), tmp_path, launch)
    ours, theirs = weights(tmp_path / "one"), weights(tmp_path / "cut")
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)
