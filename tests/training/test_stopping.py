"""Runs stop in time and anywhere, and go on as if they had never stopped."""

import json
import os
import subprocess
import sys
import time

import pytest
from run_folders import assert_same_run

from interlayer.experiments.turns import in_turns
from interlayer.training import Stopped, stop, train
from interlayer.training.logs import read_metrics
from interlayer.training.stop import RESERVE, TimeBudget, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("1.5h", 5400), ("2h5m10s", 7510), (" 3m ", 180)]
)
def test_times_are_written_with_their_units(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "ten minutes", "0s", "5d", "10m1h", "1.2.3h", "-5m", "h"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match="expected a time such as 90s, 10m or 1h30m, got"):
        parse_duration(text)


def budget(text, times):
    """The answers of a budget that is called at these times after it began at 0."""
    asked = TimeBudget(text, clock=iter([0.0, *times]).__next__)
    return [asked() for _ in times]


@pytest.fixture
def checkpoints(monkeypatch):
    """Forgets the checkpoints of other tests, and returns the function that records one."""
    monkeypatch.setattr(stop._Checkpoints, "slowest", 0.0)
    return stop.record_checkpoint


def test_a_budget_keeps_time_for_checkpoints(checkpoints):
    assert budget("100s", [10, 20, 79, 80]) == [False, False, False, True], "at most a fifth in reserve"
    quick = [second / 10 for second in range(1, 1000)]
    assert budget("100s", quick).index(True) == quick.index(100 - RESERVE)
    steps = [float(second) for second in range(2, 100, 2)]
    assert steps[budget("100s", steps).index(True)] == 98, "one more step is possible"
    for seconds in (2.0, 1.0):
        checkpoints(seconds)
    assert steps[budget("100s", steps).index(True)] == 90, "four runs that share a device save one after another"
    assert budget("10s", [9.0, 1.0]) == [True, True], "it stays spent"


def test_a_budget_does_not_reserve_time_for_a_beginning_that_took_long(checkpoints):
    """A network is measured and compiled in it; at the end, steps are short."""
    steps = [60.0, 61.0, *(62.0 + step / 2 for step in range(1100))]
    assert steps[budget("600s", steps).index(True)] == 600 - RESERVE
    assert steps[budget("90s", steps).index(True)] == 90 - 18, "as long as it was just now"


def test_a_run_records_how_long_its_checkpoints_take(small, tmp_path, checkpoints):
    train(small(epochs=1), tmp_path)
    assert stop.slowest_checkpoint() > 0


def test_a_budget_counts_from_its_beginning():
    assert TimeBudget("100s", began=-99.0, clock=lambda: 0.0)()
    assert not TimeBudget("100s", began=-90.0, clock=lambda: 0.0)()


def stopping(when):
    """Returns functions `stop` and `show`: a stop is requested once a run shows what `when` accepts."""
    seen = []

    def show(progress):
        seen.append(when(progress))

    return lambda: any(seen), show


@pytest.mark.parametrize(
    ("what", "where"), [("evaluating", "evaluation after epoch 2"), ("testing", "test after epoch 3")]
)
@pytest.mark.parametrize("loaded", [False, True])
def test_a_run_that_is_stopped_in_an_evaluation_repeats_it(small, digit_files, tmp_path, what, where, loaded):
    """Evaluations can be long. Workers that load images draw a random seed, which must not be drawn twice."""
    files = {"data": str(digit_files), "resident": "no", "crop": "resized", "batch_size": 24, "workers": 1}
    recipe = small(epochs=3, drop_rate=0.2, eval_batch_size=16, validation=40, **(files if loaded else {}))
    train(recipe, tmp_path / "whole")
    stop, show = stopping(lambda progress: progress.what == what and progress.epoch >= 1)
    with pytest.raises(Stopped, match=f"stopped at the {where}"):
        train(recipe, tmp_path / "cut", stop=stop, show=show)
    assert not (tmp_path / "cut" / "summary.json").exists()
    train(recipe, tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("what", ["training", "evaluating"])
def test_the_time_of_an_epoch_that_was_stopped_counts_what_was_before(small, tmp_path, what):
    """Otherwise the epochs of a run in pieces would seem quick, and one that was evaluated later to take no time."""
    recipe = small(epochs=1, eval_batch_size=16, validation=40)

    def show(progress):
        if progress.what == "training":
            time.sleep(0.2)

    stop, seen = stopping(lambda progress: progress.what == what and progress.step >= 2)
    with pytest.raises(Stopped):
        train(recipe, tmp_path, stop=stop, show=lambda progress: (show(progress), seen(progress)))
    train(recipe, tmp_path, resume=True)
    (row,) = read_metrics(tmp_path)
    steps = row["step"]
    assert row["seconds"] > 0.2 * (2 if what == "training" else steps - 1)
    assert row["images_per_second"] == pytest.approx(steps * recipe.batch_size / row["seconds"], rel=1e-3)
    assert json.loads((tmp_path / "summary.json").read_text())["seconds"] >= row["seconds"]


class FakeTrainer:
    """A run of some steps, which writes when it starts, steps and ends."""

    def __init__(self, name, steps, log):
        self.name, self.steps, self.log = name, steps, log
        self.loop = None

    def run(self):
        self.log.append(f"{self.name} starts")
        for step in range(self.steps):
            yield self.name
            if self.name == "stopped":
                raise Stopped("stopped")
            self.loop = step
        self.log.append(f"{self.name} ends")

    def close(self):
        self.log.append(f"{self.name} closed")


def test_the_next_run_starts_when_one_ends():
    """Runs of different length keep the device busy: nothing waits for the longest of a group."""
    log = []
    runs = [FakeTrainer(name, steps, log) for name, steps in (("a", 1), ("b", 6), ("c", 1), ("d", 2))]
    active = list(in_turns(iter(runs), 2))
    assert "".join(active) == "abbbcbbdbd", "b steps in every round"
    starts = [text for text in log if text.endswith(("starts", "ends"))]
    assert starts == ["a starts", "b starts", "a ends", "c starts", "c ends", "d starts", "b ends", "d ends"]


def test_a_run_that_has_not_loaded_its_images_does_not_load_them_to_stop():
    log = []
    runs = [FakeTrainer(name, 3, log) for name in ("stopped", "loading")]
    with pytest.raises(Stopped):
        list(in_turns(iter(runs), 2))
    assert log == ["stopped starts", "loading starts", "stopped closed", "loading closed"]


def test_no_run_starts_after_a_stop_and_none_is_missed_at_the_end():
    log = []
    runs = [FakeTrainer(name, 2, log) for name in "ab"]
    asked = iter([False, True])
    with pytest.raises(Stopped, match="before the next run"):
        list(in_turns(iter(runs), 1, lambda: next(asked)))
    assert log == ["a starts", "a ends", "a closed", "b closed"]
    asked = iter([False])  # a stop that comes when all runs are done is no stop
    assert list(in_turns(iter([FakeTrainer("c", 1, [])]), 1, lambda: next(asked))) == ["c"]


def test_a_command_stops_within_its_budget_and_names_the_one_that_goes_on(small, tmp_path):
    recipe, folder = small(epochs=5000), tmp_path / "run"
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    command = [sys.executable, "-m", "interlayer"]
    options = {"capture_output": True, "text": True, "timeout": 200, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    arguments = ["train", "--recipe", str(tmp_path / "recipe.yaml"), "--output", str(folder), "--budget", "4s"]
    result = subprocess.run([*command, *arguments], **options)
    assert result.returncode == 143, result.stderr
    assert f"a checkpoint is saved, go on with: interlayer resume {folder} --budget 4s" in result.stderr
    first = sorted((folder / "checkpoints").iterdir())[-1].name
    again = subprocess.run([*command, "resume", str(folder), "--budget", "4s"], **options)
    assert again.returncode == 143, again.stderr
    assert sorted((folder / "checkpoints").iterdir())[-1].name > first, "every call makes progress"
