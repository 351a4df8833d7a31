"""`interlayer resume` continues a run or a comparison from its folder alone."""

import json

import pytest
from command_line import fails, run, run_forked
from digit_images import SMALL
from run_folders import assert_same_run

from interlayer.experiments import compare
from interlayer.training import Stopped, train
from interlayer.training.recipe import from_values
from interlayer_cli.compare import seeds_in, seeds_text


def stopping_after(steps):
    """A function that asks to stop after some steps."""
    asked = iter(range(steps))
    return lambda: next(asked, None) is None


@pytest.fixture
def recipe():
    return from_values({**SMALL, "epochs": 3})


def test_a_stopped_run_continues_from_its_folder_alone(recipe, tmp_path):
    train(recipe, tmp_path / "whole", command="interlayer train --whole")
    with pytest.raises(Stopped):
        train(recipe, tmp_path / "cut", stop=stopping_after(7), command="interlayer train --cut")
    assert "epochs cannot change when a run is resumed, only" in fails("resume", tmp_path / "cut", "epochs=9")
    result = run("resume", tmp_path / "cut", "workers=1", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "weights: those of the checkpoint at epoch" in result.stdout, "they are not newly initialized"
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    summary = json.loads((tmp_path / "cut" / "summary.json").read_text())
    assert summary["command"] == "interlayer train --cut", "the command that reproduces the run"
    assert "holds no run and no comparison" in fails("resume", tmp_path)
    again = run_forked("resume", tmp_path / "cut")
    assert (again.returncode, "is finished, nothing is left to do" in again.stdout) == (0, True)


@pytest.mark.parametrize("seeds", [[0, 1], [2, 4]])
def test_a_stopped_comparison_continues_from_its_folder_alone(seeds, recipe, tmp_path):
    models = ["preresnet20_cifar", "preresnet20_cifar+mrla_light"]
    short = recipe.replace(epochs=1)
    compare(short, models, tmp_path / "whole", seeds=seeds)
    with pytest.raises(Stopped):
        compare(short, models, tmp_path / "cut", seeds=seeds, stop=stopping_after(3), command="interlayer compare x")
    result = run_forked("resume", tmp_path / "cut")
    assert result.returncode == 0, result.stderr
    for model in models:
        for seed in seeds:
            assert_same_run(tmp_path / "whole" / model / f"seed{seed}", tmp_path / "cut" / model / f"seed{seed}")
    assert (tmp_path / "cut" / "report.html").is_file()


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("3", [0, 1, 2]), ("1", [0]), ("2-4", [2, 3, 4]), ("4-4", [4]), ("3,0", [0, 3]), ("1-2,7", [1, 2, 7])],
)
def test_seeds_are_a_number_or_named(text, seeds):
    assert seeds_in(text) == seeds
    assert seeds_in(seeds_text(seeds)) == seeds


@pytest.mark.parametrize("text", ["0", "-1", "two", "3-1", "1,1", "", "1-", "0-2,1"])
def test_other_seeds_are_refused(text):
    with pytest.raises(ValueError, match="expected a number of seeds, such as 3, or seeds, such as 2-4 or 0,3, got"):
        seeds_in(text)


def test_refused_seeds_leave_no_folder(tmp_path):
    refused = fails("compare", "--seeds=1,1", "--recipe", "digits", "--output", tmp_path / "none")
    assert "--seeds: expected a number of seeds" in refused
    assert not (tmp_path / "none").exists()
