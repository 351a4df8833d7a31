"""A run that is repeatedly killed by SIGKILL at random times gives the same result as an uninterrupted run."""

import random
import signal
import subprocess
import sys
import time

import pytest
from test_trainer import RICH, assert_same_run

from interlayer.models import save_weights
from interlayer.models.build import build_network
from interlayer.training import train

KILLS = 20


def start(recipe_file, folder):
    command = [sys.executable, "-m", "interlayer", "train", "--recipe", str(recipe_file), "--output", str(folder)]
    return subprocess.Popen([*command, "--resume"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def kill_until(recipe, tmp_path, kills, seconds):
    """Repeatedly starts and kills the run at random times, then lets it finish. Returns the last checkpoint of each."""
    folder, recipe_file = tmp_path / "killed", tmp_path / "recipe.yaml"
    recipe_file.write_text(recipe.to_yaml())
    draws, places = random.Random(0), []
    while len(places) < kills:
        process = start(recipe_file, folder)
        known = {path.name for path in (folder / "checkpoints").glob("step_*")}
        while process.poll() is None:  # wait until training has started, because importing takes seconds
            if {path.name for path in (folder / "checkpoints").glob("step_*")} - known:
                break
            time.sleep(0.002)
        time.sleep(draws.uniform(0, seconds))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (folder / "summary.json").exists(), f"the run ended after {len(places)} kills: make it longer"
        places.append(sorted(path.name for path in (folder / "checkpoints").glob("step_*"))[-1])
    process = start(recipe_file, folder)
    assert process.wait() == 0, process.stderr.read()
    return places


def long_run(small, epochs):
    return small(**{**RICH, "epochs": epochs, "batch_size": 64, "checkpoint_steps": 3})


@pytest.mark.parametrize("frozen", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_that_is_killed_ends_as_one_that_was_not(small, tmp_path, frozen):
    recipe = long_run(small, 6)
    if frozen:
        weights = tmp_path / "start.safetensors"
        save_weights(build_network(recipe.model, num_classes=5, model_options=recipe.model_options), weights)
        recipe = recipe.replace(weights=str(weights), freeze_epochs=2.5, new_lr_scale=10)
    train(recipe, tmp_path / "whole")
    kill_until(recipe, tmp_path, 1, 0.3)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_nothing(small, tmp_path):
    recipe = long_run(small, 60)
    train(recipe, tmp_path / "whole")
    places = kill_until(recipe, tmp_path, KILLS, 0.6)
    assert len(places) == KILLS
    assert len(set(places)) > KILLS / 2, "the moments must differ"
    print("killed after", ", ".join(places))
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
