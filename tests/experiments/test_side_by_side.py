"""Runs in processes of their own: their results, and what happens if they or their caller end."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from run_folders import assert_same_run

from interlayer.experiments import compare, side_by_side
from interlayer.experiments.record import read_record
from interlayer.training import Stopped, TrainingError

PLAIN, LIGHT = MODELS = ["preresnet20_cifar", "preresnet20_cifar+mrla_light"]


@pytest.fixture
def recipe(small):
    return small(epochs=3, drop_rate=0.2, attach_options={"channels_per_head": 8})


@pytest.fixture(autouse=True)
def _same_threads(monkeypatch):
    """Two processes compute with as many threads as this one: other threads, other last bits."""
    monkeypatch.setattr(side_by_side, "available_cores", lambda: 2 * torch.get_num_threads())


def runs_of(folder, seeds):
    return [folder / model / f"seed{seed}" for model in MODELS for seed in seeds]


def test_results_are_those_of_one_run_after_the_other(recipe, digit_files, tmp_path, caplog):
    """Progress, opening lines and warnings arrive as well; what two runs say is said once."""
    broken = digit_files / "train" / "0" / "broken.png"
    broken.write_bytes(b"no image")
    files = {"data": str(digit_files), "resident": "no", "crop": "resized", "batch_size": 24, "on_bad_image": "skip"}
    recipe = recipe.replace(**files, epochs=1)
    try:
        alone = compare(recipe, MODELS, tmp_path / "alone", seeds=[0])
        caplog.clear()
        shown, understood = [], []
        found = compare(
            recipe, MODELS, tmp_path / "both", seeds=[0], side_by_side=2, show=shown.append,
            on_start=lambda overview: understood.append(overview.model),
        )  # fmt: skip
    finally:
        broken.unlink()
    for ours, theirs in zip(runs_of(tmp_path / "both", [0]), runs_of(tmp_path / "alone", [0]), strict=True):
        assert_same_run(ours, theirs)
    assert sorted(understood) == MODELS
    assert found.together == 2
    assert alone.together == 1
    for folder in runs_of(tmp_path / "both", [0]):
        seen = [progress.what for progress in shown if progress.folder == folder]
        assert seen[-1] == "done"
        assert {"training", "evaluating", "testing"} <= set(seen)
    warned = [record.message for record in caplog.records if "broken.png" in record.message]
    assert len(warned) == 2, "by the measuring of the networks, and by the first run that loads it"


def test_a_stopped_comparison_goes_on_as_if_it_had_not_stopped(recipe, tmp_path):
    compare(recipe, MODELS, tmp_path / "whole", seeds=[0])
    trained = set()

    def show(progress):
        if progress.what == "training":
            trained.add(progress.folder)

    with pytest.raises(Stopped, match="stopped at epoch"):
        compare(
            recipe, MODELS, tmp_path / "cut", seeds=[0, 1], side_by_side=2, stop=lambda: len(trained) == 2, show=show
        )
    first = [folder for folder in runs_of(tmp_path / "cut", [0, 1]) if list(folder.glob("checkpoints/step_*"))]
    assert first == runs_of(tmp_path / "cut", [0]), "both runs have a checkpoint, and no further run has begun"
    assert read_record(tmp_path / "cut").side_by_side == 2
    compare(recipe, MODELS, tmp_path / "cut", seeds=[0], side_by_side=2, resume=True)
    for ours, theirs in zip(runs_of(tmp_path / "cut", [0]), runs_of(tmp_path / "whole", [0]), strict=True):
        assert_same_run(ours, theirs)


def test_a_run_whose_process_is_killed_ends_the_others_with_a_checkpoint(recipe, tmp_path):
    """The kernel kills the largest process if the memory is used up. Nothing of the others may be lost."""
    killed = []

    def show(progress):
        if progress.what == "evaluated" and not killed:
            killed.append(progress.folder)
            process = next(p for p in multiprocessing.active_children() if str(progress.folder) in p.name)
            os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(TrainingError, match=r"ended with exit code -9 and no message: was it\s+killed") as error:
        compare(recipe.replace(epochs=20), MODELS, tmp_path, seeds=[0], side_by_side=2, show=show)
    assert str(killed[0]) in str(error.value)
    for folder in runs_of(tmp_path, [0]):
        assert list(folder.glob("checkpoints/step_*"))
    assert not multiprocessing.active_children()


def test_an_error_of_a_run_is_the_error_of_the_comparison(recipe, tmp_path):
    """As one sentence that names the remedy, not as a traceback of another process."""
    with pytest.raises(TrainingError, match=r"the loss is not finite at epoch 1.*Lower lr") as error:
        compare(recipe.replace(lr=1e30), MODELS, tmp_path, seeds=[0], side_by_side=1)
    assert "Traceback" not in str(error.value)
    assert "Traceback" in error.value.__notes__[0], "for whoever debugs it"


def test_runs_either_alternate_or_have_processes(recipe, tmp_path):
    with pytest.raises(TrainingError, match="give one of them"):
        compare(recipe, MODELS, tmp_path, together=2, side_by_side=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_runs_do_not_outlive_their_command(number, tmp_path):
    """SIGTERM, which a scheduler sends to all processes, is a stop. After SIGKILL nobody is there to ask for one."""
    words = ["compare", "--recipe", "digits", "--seeds", "1", "--side-by-side", "2", "--output", tmp_path, "epochs=40"]
    command = [sys.executable, "-m", "interlayer", *map(str, words)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    folders = [tmp_path / "preresnet20_cifar" / "seed0", tmp_path / "preresnet20_cifar+mrla_light" / "seed0"]
    while not all(list(folder.glob("checkpoints/*")) for folder in folders):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    if number == signal.SIGKILL:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    else:
        os.killpg(process.pid, number)
        assert process.wait() == 128 + number
        assert "checkpoints are saved, go on with: interlayer resume" in process.stderr.read()
    for _ in range(600):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        pytest.fail("processes of the runs are still there after a minute")
    assert all((folder / "checkpoints").is_dir() and not (folder / "summary.json").exists() for folder in folders)
