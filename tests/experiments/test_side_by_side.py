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
    recipe = recipe.replace(epochs=12)  # so that the first run does not end before the second begins
    compare(recipe, MODELS, tmp_path / "whole", seeds=[0])
    trained = set()

    def show(progress):
        if progress.what == "training":
            trained.add(progress.folder)

    with pytest.raises(Stopped, match="stopped at"):
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
    killed, evaluated = [], set()

    def show(progress):
        if progress.what == "evaluated":
            evaluated.add(progress.folder)
        if len(evaluated) == 2 and not killed:
            killed.append(progress.folder)
            process = next(p for p in multiprocessing.active_children() if str(progress.folder) in p.name)
            os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(TrainingError, match=r"was killed by signal 9: is the memory .* can be resumed$") as error:
        compare(recipe.replace(epochs=100), MODELS, tmp_path, seeds=[0], side_by_side=2, show=show)
    assert str(killed[0]) in str(error.value)
    for folder in runs_of(tmp_path, [0]):
        assert list(folder.glob("checkpoints/step_*"))
    assert not any("training in" in process.name for process in multiprocessing.active_children())


def test_an_error_of_a_run_is_the_error_of_the_comparison(recipe, tmp_path):
    """As one sentence that names the remedy, not as a traceback of another process."""
    with pytest.raises(TrainingError, match=r"the loss is not finite at epoch 1.*Lower lr") as error:
        compare(recipe.replace(lr=1e30), MODELS, tmp_path, seeds=[0], side_by_side=1)
    assert "Traceback" not in str(error.value)
    assert "Traceback" in error.value.__notes__[0], "for whoever debugs it"


def test_an_error_of_the_caller_ends_the_runs(recipe, tmp_path):
    """As long as somebody holds the exception, its traceback holds the pipes, which nobody would read."""

    evaluated = set()

    def show(progress):
        if progress.what == "evaluated":
            evaluated.add(progress.folder)
        if len(evaluated) == 2:
            raise ConnectionError("nobody sees the progress")

    with pytest.raises(ConnectionError) as kept:
        compare(recipe.replace(epochs=100), MODELS, tmp_path, seeds=[0], side_by_side=2, show=show)
    assert kept.value.__traceback__ is not None
    assert not any("training in" in process.name for process in multiprocessing.active_children())
    assert all(list(folder.glob("checkpoints/step_*")) for folder in runs_of(tmp_path, [0]))


def test_a_run_that_has_not_begun_is_not_begun_after_a_stop(recipe, tmp_path):
    """It would load its images and make a step, for which a budget has no time left."""
    loading = []

    def show(progress):
        loading.append(progress.what == "loading")

    with pytest.raises(Stopped, match="before its first step"):
        compare(recipe, MODELS, tmp_path, seeds=[0], side_by_side=1, stop=lambda: any(loading), show=show)
    assert not list(tmp_path.glob("*/*/checkpoints/*"))


def test_the_number_with_which_a_comparison_was_resumed_is_recorded(recipe, tmp_path):
    """`interlayer resume` would otherwise start as many runs as the memory did not hold."""
    options = {"seeds": [0], "stop": lambda: True}
    with pytest.raises(Stopped):
        compare(recipe, MODELS, tmp_path, side_by_side=2, **options)
    with pytest.raises(Stopped):
        compare(recipe, MODELS, tmp_path, resume=True, **options)
    assert read_record(tmp_path).side_by_side == 2
    with pytest.raises(Stopped):
        compare(recipe, MODELS, tmp_path, resume=True, side_by_side=1, **options)
    assert read_record(tmp_path).side_by_side == 1
    with pytest.raises(Stopped):
        compare(recipe, MODELS, tmp_path, resume=True, together=1, **options)
    record = read_record(tmp_path)
    assert (record.together, record.side_by_side) == (1, None)


def test_a_script_without_a_guard_is_told_what_it_needs(tmp_path):
    """Each process imports the script, and would start runs of its own."""
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from interlayer.experiments import compare\n"
        "from interlayer.training import load_recipe\n"
        "recipe = load_recipe('digits', ['epochs=1', 'image_size=8', 'padding=1', 'model_options.blocks=1'])\n"
        f"compare(recipe, {MODELS}, Path({str(tmp_path / 'runs')!r}), seeds=[0], side_by_side=2)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert "ended with exit code 1, see its error above; a script that calls" in done.stderr
    assert "needs `if __name__ == '__main__':`" in done.stderr


def test_runs_either_alternate_or_have_processes(recipe, tmp_path):
    with pytest.raises(TrainingError, match="give one of them"):
        compare(recipe, MODELS, tmp_path, together=2, side_by_side=2)
    with pytest.raises(TrainingError, match="expected side_by_side of at least 1, got 0"):
        compare(recipe, MODELS, tmp_path, side_by_side=0)
    assert not list(tmp_path.iterdir())


def start(folder):
    words = ["compare", "--recipe", "digits", "--seeds", "1", "--side-by-side", "2", "--output", folder, "epochs=40"]
    command = [sys.executable, "-m", "interlayer", *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_until_gone(group):
    for _ in range(600):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("processes of the runs are still there after a minute")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_runs_do_not_outlive_their_command(number, tmp_path):
    """SIGTERM, which a scheduler sends to all processes, is a stop. After SIGKILL nobody is there to ask for one."""
    process = start(tmp_path)
    folders = runs_of(tmp_path, [0])
    while not all(list(folder.glob("checkpoints/*")) for folder in folders):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    if number == signal.SIGKILL:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    else:
        for _ in range(3):  # some schedulers send it more than once
            os.killpg(process.pid, number)
            time.sleep(0.01)
        assert process.wait() == 128 + number
        assert "checkpoints are saved, go on with: interlayer resume" in process.stderr.read()
    wait_until_gone(process.pid)
    assert all((folder / "checkpoints").is_dir() and not (folder / "summary.json").exists() for folder in folders)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_stop_while_runs_start_is_a_stop(number, seconds, tmp_path):
    """For seconds they import the library, before they can handle a signal."""
    process = start(tmp_path)
    while subprocess.run(["pgrep", "-g", str(process.pid), "-f", "spawn_main"], capture_output=True).returncode:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    time.sleep(seconds)
    os.killpg(process.pid, number)
    assert process.wait() == 128 + number
    said = process.stderr.read()
    assert "go on with: interlayer resume" in said
    assert "Traceback" not in said
    wait_until_gone(process.pid)
