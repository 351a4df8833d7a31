"""A regression task from outside the package trains, resumes after a kill, is compared, reported and evaluated."""

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from digit_value import DigitValue
from run_folders import assert_same_run

from interlayer.experiments import TrainedNetwork, compare, comparison_table, evaluate
from interlayer.pages import write_comparison_report, write_run_report
from interlayer.tasks import TASKS
from interlayer.training import train

HERE = Path(__file__).parent
SETTING = {"task": DigitValue.name, "lr": 0.05, "optimizer": "adamw", "batch_size": 64}


def interlayer(*arguments, **options):
    """Starts `interlayer` in a separate process in which the task is registered."""
    program = f"import sys; sys.path.insert(0, {str(HERE)!r}); import digit_value; "
    command = [sys.executable, "-c", program + "from interlayer_cli.app import main; main()", *map(str, arguments)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_the_task_is_short():
    assert len((HERE / "digit_value.py").read_text().splitlines()) <= 60
    assert TASKS[DigitValue.name] is DigitValue


def test_it_trains_and_the_lowest_error_is_the_best(small, tmp_path):
    summary = train(small(**SETTING, validation=200, epochs=4, mixup=0.2), tmp_path / "run")
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "epoch", "step", "lr", "train_loss", "train_error", "eval_loss", "eval_error", "seconds", "eval_seconds",
        "images_per_second",
    ]  # fmt: skip
    errors = [float(row["eval_error"]) for row in rows]
    assert min(errors) < 2, "guessing the mean digit is off by 2.5"
    assert summary["chosen_epoch"] == errors.index(min(errors)) + 1
    assert summary["chosen_by"] == "validation mean absolute error"
    assert set(summary["test"]) == {"error", "loss", "images"}
    assert summary["test"]["error"] < 2.5


@pytest.mark.slow  # of classification: test_trainer.py
def test_it_resumes_after_a_kill(small, tmp_path):
    """A run that is killed by SIGKILL within an epoch and resumed gives the same result as an uninterrupted run."""
    recipe = small(**SETTING, epochs=8, checkpoint_steps=3, drop_rate=0.2, validation=200)
    train(recipe, tmp_path / "whole")
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    process = interlayer("train", "--recipe", tmp_path / "recipe.yaml", "--output", tmp_path / "killed")
    while not list((tmp_path / "killed" / "checkpoints").glob("step_*")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "killed" / "summary.json").exists(), "the run ended before it could be killed"
    train(recipe, tmp_path / "killed", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_it_is_compared_reported_and_evaluated(small, tmp_path):
    recipe = small(**SETTING, epochs=1, attach_options={"channels_per_head": 8})
    comparison = compare(recipe, ["preresnet20_cifar+mrla_light"], tmp_path / "both", seeds=[0, 1])
    written = json.loads((tmp_path / "both" / "comparison.json").read_text())
    assert written["metric"] == "error"
    assert written["models"][0]["values"] == comparison.results[0].values
    assert "in mean absolute error" in comparison.verdicts()[0]
    table = comparison_table(comparison)
    assert table.columns[1] == "mean absolute error"
    assert table.rows[0][1].startswith(f"{comparison.results[0].mean:.4f} ± ")
    page = write_comparison_report(comparison).read_text()
    for text in (
        "Mean absolute error and cost",
        "Mean absolute error over epochs",
        "Furthest off",
        "Which layer reads",
    ):
        assert text in page
    folder = comparison.results[1].folders[0]
    summary = json.loads((folder / "summary.json").read_text())
    assert f"mrla_light: {summary['test']['error']:.4f}</h1>" in write_run_report(folder).read_text()
    scores = evaluate(TrainedNetwork(folder))
    assert scores["error"] == summary["test"]["error"]
    assert scores["contribution"]["changed"] is None, "a value has no discrete answer that could change"
    assert scores["contribution"]["value"] == scores["error"] != scores["contribution"]["value_without"]
    assert "switched off, mean absolute error " in comparison.verdicts()[1]
    assert TrainedNetwork(folder).task.show_details(scores)[0].columns == ["images", "mean absolute error", "loss"]


def test_the_command_line_trains_and_reports_it(small, tmp_path):
    (tmp_path / "recipe.yaml").write_text(small(**SETTING, epochs=1).to_yaml())
    process = interlayer("train", "--recipe", tmp_path / "recipe.yaml", "--output", tmp_path / "run")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    test = json.loads((tmp_path / "run" / "summary.json").read_text())["test"]
    assert f"test mean absolute error {test['error']:.4f} on 360 images" in output
    assert "held out" in errors
    report = (tmp_path / "run" / "report.html").read_text()
    assert "Furthest off" in report
    assert "accuracy" not in output + errors + report
