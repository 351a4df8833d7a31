"""Comparisons in which every network trains for the same time, and what networks cost."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
from dense_data import small_recipe, write_objects
from digit_images import SMALL
from run_folders import assert_same_run

from interlayer.experiments import compare, comparison_table, costs
from interlayer.experiments.compare import recipe_for
from interlayer.experiments.costs import equal_time_epochs, measured_epoch_seconds
from interlayer.experiments.record import read_record
from interlayer.training import Stopped
from interlayer.training.data import open_data
from interlayer.training.processes import init_processes
from interlayer.training.recipe import from_values
from interlayer.training.setup import set_up

PLAIN, LIGHT = "preresnet20_cifar", "preresnet20_cifar+mrla_light"
RECIPE = from_values({**SMALL, "epochs": 2})


def test_epochs_fit_into_the_time_of_the_slowest_network():
    assert equal_time_epochs(10, {"a": 1.0, "b": 1.38, "c": 1.39}) == {"a": 13, "b": 10, "c": 10}
    assert equal_time_epochs(3, {"a": 0.1, "b": 0.3}) == {"a": 9, "b": 3}, "not 8 by rounding"


def test_networks_that_are_added_get_the_time_of_the_others():
    """A slower network that is added must not train for longer than those that are finished."""
    seconds = {"a": 1.0, "b": 1.38, "slow": 2.0, "slower": 20.0}
    assert equal_time_epochs(10, seconds, {"a": 13, "b": 10}) == {"a": 13, "b": 10, "slow": 6, "slower": 1}


def test_the_schedule_of_a_longer_run_is_stretched():
    recipe = RECIPE.replace(epochs=10, schedule="multistep", milestones=[5, 8])
    longer = recipe_for(recipe, PLAIN, 1, 15)
    assert (longer.epochs, longer.milestones, longer.decay_epochs) == (15, [8, 12], 45.0)
    assert recipe_for(recipe, PLAIN, 1, 10) == recipe_for(recipe, PLAIN, 1)


@pytest.fixture
def timed(monkeypatch):
    """Makes the plain network take 1 s and the other one 1.6 s for an epoch. Returns the networks that were timed."""
    found = []

    def seconds(recipe, data, processes):
        found.append(recipe.model)
        return 1.0 if recipe.model == PLAIN else 1.6

    monkeypatch.setattr(sys.modules["interlayer.experiments.compare"], "measured_epoch_seconds", seconds)
    return found


def test_the_plain_network_trains_longer_and_this_is_said(timed, tmp_path):
    found = compare(RECIPE, [LIGHT], tmp_path / "whole", seeds=[0], equal_time=True)
    assert [result.cost.epochs for result in found.results] == [3, 2]
    assert [len((result.folders[0] / "metrics.csv").read_text().splitlines()) for result in found.results] == [4, 3]
    assert (
        f"Networks were trained for the time that the slowest takes: {PLAIN} for 3 epochs and {LIGHT} for 2 epochs."
        in found.verdicts()
    )
    table = comparison_table(found)
    column = table.columns.index("training")
    assert [row[column].split(" x ")[0] for row in table.rows] == ["3", "2"]
    assert "as many as fit into the time of the slowest network" in table.note
    assert json.loads((tmp_path / "whole" / "comparison.json").read_text())["equal_time"] is True


def test_a_resumed_comparison_has_the_epochs_of_its_record(timed, tmp_path):
    """Times are never the same twice, but runs must be."""
    whole = compare(RECIPE, [LIGHT], tmp_path / "whole", seeds=[0], equal_time=True)
    count = iter(range(10**9))
    with pytest.raises(Stopped):
        compare(RECIPE, [LIGHT], tmp_path / "cut", seeds=[0], equal_time=True, stop=lambda: next(count) > 8)
    assert read_record(tmp_path / "cut").epochs == {PLAIN: 3, LIGHT: 2}
    timed.clear()
    again = compare(RECIPE, [LIGHT], tmp_path / "cut", seeds=[0], resume=True)
    assert again.equal_time
    assert timed == [], "nothing is measured again"
    for ours, theirs in zip(again.results, whole.results, strict=True):
        assert_same_run(ours.folders[0], theirs.folders[0])


def test_a_stop_while_networks_are_measured_loses_nothing(timed, tmp_path):
    asked = []

    def stop():
        asked.append(True)
        return len(asked) > 3  # two networks are measured, one is timed

    with pytest.raises(Stopped, match=f"stopped before timing {re.escape(LIGHT)}"):
        compare(RECIPE, [LIGHT], tmp_path, seeds=[0], equal_time=True, stop=stop)
    assert timed == [PLAIN]
    again = compare(RECIPE, [LIGHT], tmp_path, seeds=[0], resume=True)
    assert timed == [PLAIN, LIGHT], "nothing is measured again"
    assert [result.cost.epochs for result in again.results] == [3, 2], "the record knows that times are to be equal"


def test_seeds_and_networks_that_are_added_are_recorded(tmp_path):
    """A stop must not forget what was asked for."""
    short = RECIPE.replace(epochs=1)
    compare(short, [PLAIN, LIGHT], tmp_path, seeds=[0])
    with pytest.raises(Stopped):
        compare(short, [PLAIN, f"{PLAIN}+eca"], tmp_path, seeds=[0, 1], resume=True, stop=lambda: True)
    record = read_record(tmp_path)
    assert (record.models, record.seeds) == ([PLAIN, LIGHT, f"{PLAIN}+eca"], [0, 1])


def test_a_network_that_is_added_trains_for_the_same_time(timed, tmp_path):
    compare(RECIPE, [LIGHT], tmp_path, seeds=[0], equal_time=True)
    added = compare(RECIPE, [PLAIN, LIGHT, f"{PLAIN}+eca"], tmp_path, seeds=[0], resume=True)
    assert [result.cost.epochs for result in added.results] == [3, 2, 2], "of 1.6 s, as the slowest before"
    assert timed == [PLAIN, LIGHT, f"{PLAIN}+eca"], "each network is timed once"


def test_runs_that_share_the_device_are_timed_alone(timed, tmp_path):
    """A step of one run waits for the steps of the others, so that the times of its epochs are not its own."""
    found = compare(RECIPE.replace(epochs=1), [LIGHT], tmp_path, seeds=[0], together=2)
    assert [result.cost.epoch_seconds for result in found.results] == [1.0, 1.6]
    assert found.together == 2
    assert "measured alone before the runs" in comparison_table(found).note


def test_an_epoch_is_timed_by_a_few_real_steps():
    """And a slower network takes longer: batches of 32 take more steps than batches of 256."""
    data, processes = open_data(RECIPE), init_processes(RECIPE)
    wide = RECIPE.replace(model=PLAIN, model_options={"blocks": 4, "widths": [32, 32, 64]})
    narrow = RECIPE.replace(model=PLAIN)
    slow, quick = (measured_epoch_seconds(recipe, data, processes) for recipe in (wide, narrow))
    assert slow > quick > 0


@pytest.fixture
def steps_of_a_detector(monkeypatch, tmp_path):
    """Replaces the steps of a detector, 4 in an epoch, by a clock: 1 s each, and 100 s for the first of a size."""
    clock, sizes, steps = [0.0], set(), []

    def run(self, batch):
        size = batch[0].shape
        steps.append(size)
        clock[0] += 1.0 if size in sizes else 100.0
        sizes.add(size)

    monkeypatch.setattr(costs.TrainStep, "run", run)
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    recipe = small_recipe("detect", write_objects(tmp_path), batch_size=2, workers=0)
    processes, data = init_processes(recipe), open_data(recipe)
    return SimpleNamespace(recipe=recipe, processes=processes, data=data, taken=steps)


def test_the_time_of_a_step_leaves_out_what_is_prepared_for_a_size_of_images(steps_of_a_detector):
    """cuDNN prepares the convolutions of a size once in a process: it would count for the first network alone."""
    found = steps_of_a_detector
    steps = costs._timed_steps(set_up(found.recipe, found.processes, found.data), prepares_sizes=True)
    assert [next(steps) for _ in range(8)] == [1.0] * 8
    assert len(set(found.taken)) > 1
    assert len(found.taken) == 8 + len(set(found.taken))


def test_slow_steps_are_timed_until_it_is_enough(steps_of_a_detector, monkeypatch):
    found = steps_of_a_detector
    monkeypatch.setattr(costs, "ENOUGH_SECONDS", 3.0)
    assert measured_epoch_seconds(found.recipe, found.data, found.processes) == 4.0, "4 steps of 1 s"
    assert len(found.taken) == 2 + 3
