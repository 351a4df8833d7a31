"""Files written by an earlier version still work: weights of every kind of mechanism, and an interrupted run.

`fixtures/version_0_1` was written before tasks and block mechanisms had their present form. A failure here
means that users lose checkpoints or runs by updating.
"""

import csv
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch

import interlayer
from interlayer.tasks import make_task
from interlayer.training.recipe import read_recipe

FOLDER = Path(__file__).parent / "fixtures" / "version_0_1"
SAVED = json.loads((FOLDER / "logits.json").read_text())
TIMES = ("seconds", "eval_seconds", "images_per_second")


def build(key):
    name, options, mechanisms = SAVED["models"][key]
    size = 32 if key == "halo" else 16
    model = timm.create_model(name, **options)
    for mechanism, chosen in mechanisms:
        interlayer.attach(model, mechanism, image_size=size, **chosen)
    image = torch.linspace(-1, 1, 2 * 3 * size * size).reshape(2, 3, size, size).sin()
    return model.eval(), image


@pytest.mark.parametrize("key", SAVED["models"])
def test_earlier_weights_load_and_give_the_same_logits(key):
    model, image = build(key)
    interlayer.load_weights(model, FOLDER / f"{key}.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(model(image).double(), torch.tensor(SAVED["logits"][key], dtype=torch.float64),
                                   rtol=1e-4, atol=1e-5)  # fmt: skip


def test_an_earlier_state_dict_with_its_descriptions_loads():
    model, image = build("vit")
    model.load_state_dict(torch.load(FOLDER / "vit.pt", weights_only=True))
    with torch.no_grad():
        torch.testing.assert_close(model(image).double(), torch.tensor(SAVED["logits"]["vit"], dtype=torch.float64),
                                   rtol=1e-4, atol=1e-5)  # fmt: skip


def test_weights_of_an_earlier_run_load_into_the_network_of_its_recipe():
    recipe = read_recipe(FOLDER / "run" / "recipe.yaml")
    assert recipe.task == "classification", "recipes of that version name no task"
    classes = json.loads((FOLDER / "finished_summary.json").read_text())["classes"]
    network = make_task(dataclasses.asdict(recipe), classes).build()
    interlayer.load_weights(network, FOLDER / "finished_weights.safetensors")
    saved = safetensors.torch.load_file(FOLDER / "finished_weights.safetensors")
    assert all(torch.equal(network.state_dict()[name], tensor) for name, tensor in saved.items())


def test_an_earlier_run_is_resumed_to_the_same_end(tmp_path):
    """The run was stopped at step 7 of 15. An uninterrupted run of the same version is stored beside it."""
    run = tmp_path / "run"
    shutil.copytree(FOLDER / "run", run)
    command = [sys.executable, "-c", "from interlayer_cli.app import main; main()", "train"]
    result = subprocess.run(
        [*command, "--recipe", run / "recipe.yaml", "--output", run, "--resume"],
        capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    files = run / "metrics.csv", FOLDER / "finished_metrics.csv"
    rows = [list(csv.DictReader(path.read_text().splitlines())) for path in files]
    assert [list(row) for row in rows[0]] == [list(row) for row in rows[1]]
    before = [{key: value for key, value in first.items() if key not in TIMES} for first, *_ in rows]
    assert before[0] == before[1], "the epoch before the stop is kept as it was written"
    for ours, theirs in zip(*rows, strict=True):
        for column in [column for column in theirs if column not in TIMES]:
            assert float(ours[column]) == pytest.approx(float(theirs[column]), rel=1e-3, abs=1e-3), column
    ours, theirs = (
        safetensors.torch.load_file(path)
        for path in (run / "weights.safetensors", FOLDER / "finished_weights.safetensors")
    )
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4)
    summaries = [json.loads(path.read_text()) for path in (run / "summary.json", FOLDER / "finished_summary.json")]
    assert set(summaries[0]) >= set(summaries[1])
    assert summaries[0]["test"].keys() == summaries[1]["test"].keys()
    assert summaries[0]["test"] == pytest.approx(summaries[1]["test"], rel=1e-3)
    assert summaries[0]["chosen_epoch"] == summaries[1]["chosen_epoch"]
