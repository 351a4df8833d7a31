"""Several real processes on the CPU: the same training as one, shared or copied, saved and resumed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from test_loop import VIT, assert_same_run, metrics, weights

from interlayer.training import train


@pytest.fixture
def launch(tmp_path):
    """A function that trains a recipe in two processes that torchrun starts."""

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
    """A network without batch norm, nothing drawn but the order of the images."""
    return small(
        model="vit_tiny_patch16_224", model_options=VIT, image_size=16, crop="none", validation=200, epochs=2, lr=0.01
    )


@pytest.mark.parametrize("accumulate", [1, 2])
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


def test_a_sharded_network_trains_as_a_copied_one_and_resumes(without_randomness, tmp_path, launch):
    """FSDP of two processes, cut after the first epoch and resumed, against one process that was never cut."""
    recipe = without_randomness.replace(sharding="fsdp", optimizer="adamw", lr=0.003)
    train(recipe.replace(sharding="none"), tmp_path / "one")
    launch(recipe, tmp_path / "whole")
    launch_kill_and_resume(recipe, tmp_path, launch)
    ours, theirs = weights(tmp_path / "one"), weights(tmp_path / "whole")
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def launch_kill_and_resume(recipe, tmp_path, launch):
    """Train in two processes, kill both after a checkpoint in the middle of an epoch, and resume."""
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


def test_more_processes_than_the_batch_can_be_cut_into_is_one_sentence(without_randomness, tmp_path, launch):
    done = launch(without_randomness.replace(batch_size=255), tmp_path / "run", expect=1)
    assert "batch_size=255 cannot be cut into 2 processes" in done.stderr
