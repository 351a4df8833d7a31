"""Files written by version 0.1.0, before tasks were objects: a run that was stopped, and the same run finished."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from run_folders import metrics, weights

from interlayer.models import load_weights
from interlayer.tasks import make_task
from interlayer.training import train
from interlayer.training.recipe import read_recipe

SAVED = Path(__file__).parent / "saved_run"
FINISHED = SAVED / "finished"


def test_a_run_stopped_by_an_earlier_version_ends_as_it_would_have(tmp_path):
    """With optimizer, moving average, dropout, mixing and the best epoch: everything with a state."""
    shutil.copytree(SAVED, tmp_path / "run", ignore=shutil.ignore_patterns("finished"))
    recipe = read_recipe(tmp_path / "run" / "recipe.yaml")
    assert recipe.task == "classification", "recipes of that version name no task"
    summary = train(recipe, tmp_path / "run", resume=True)
    ours, theirs = metrics(tmp_path / "run"), metrics(FINISHED)
    assert ours[0] == theirs[0], "the epoch before the stop is kept as it was written"
    for row, expected in zip(ours, theirs, strict=True):
        assert list(row) == list(expected)
        for key in row:
            assert float(row[key]) == pytest.approx(float(expected[key]), rel=1e-3), key
    expected = json.loads((FINISHED / "summary.json").read_text())
    assert summary["chosen_epoch"] == expected["chosen_epoch"]
    assert summary["test"] == pytest.approx(expected["test"], rel=1e-3)
    for name, tensor in weights(tmp_path / "run").items():
        torch.testing.assert_close(tensor, weights(FINISHED)[name], rtol=1e-3, atol=1e-4)


def test_weights_of_an_earlier_version_load():
    recipe = read_recipe(FINISHED / "recipe.yaml")
    classes = json.loads((FINISHED / "summary.json").read_text())["classes"]
    network = make_task({"model": recipe.model, "model_options": recipe.model_options}, classes).build()
    load_weights(network, FINISHED / "weights.safetensors")
    assert all(torch.equal(network.state_dict()[name], tensor) for name, tensor in weights(FINISHED).items())
