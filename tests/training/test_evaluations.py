"""Evaluation after some of the epochs only (eval_every)."""

import math

import pytest
from run_folders import assert_same_run, metrics, weights

from interlayer.pages import figures, write_run_report
from interlayer.tasks import make_task
from interlayer.training import Stopped, train
from interlayer.training.logs import read_metrics
from interlayer.training.recipe import RecipeError


def test_seldom_evaluations_change_nothing_but_what_is_written(small, tmp_path):
    always, seldom = small(epochs=5, drop_rate=0.2), small(epochs=5, drop_rate=0.2, eval_every=2)
    train(always, tmp_path / "always")
    train(seldom, tmp_path / "seldom")
    assert all(
        (a == b).all() for a, b in zip(*(weights(tmp_path / n).values() for n in ("always", "seldom")), strict=True)
    )
    rows = zip(*(metrics(tmp_path / name) for name in ("always", "seldom")), strict=True)
    for epoch, (full, some) in enumerate(rows, 1):
        evaluated = epoch in (2, 4, 5)
        assert [key for key in full if full[key] != some[key]] == (
            [] if evaluated else [key for key in full if key.startswith("eval_")]
        )
        assert evaluated or some["eval_accuracy"] == "nan"


def test_the_best_epoch_is_one_that_was_evaluated(small, tmp_path):
    summary = train(small(epochs=5, validation=200, eval_every=3, lr=0.1), tmp_path / "run")
    rows = [row for row in read_metrics(tmp_path / "run") if not math.isnan(row["eval_accuracy"])]
    assert [row["epoch"] for row in rows] == [3, 5]
    best = max(rows, key=lambda row: row["eval_accuracy"])
    assert summary["chosen_epoch"] == best["epoch"]


def test_a_stopped_run_goes_on_with_the_same_evaluations(small, tmp_path):
    recipe = small(epochs=4, eval_every=3, validation=100)
    train(recipe, tmp_path / "whole")
    count = iter(range(10**9))
    with pytest.raises(Stopped):
        train(recipe, tmp_path / "cut", stop=lambda: next(count) > 6)
    train(recipe, tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_curves_connect_the_epochs_that_were_evaluated(small, tmp_path, monkeypatch):
    train(small(epochs=3, eval_every=2), tmp_path / "run")
    drawn = []
    monkeypatch.setattr(figures, "svg", lambda figure: drawn.append(figure) or "")
    figures.curves(make_task({}, []), {"network": [tmp_path / "run"]})
    lines = [list(line.get_xdata()) for line in drawn[0].axes[0].lines]
    assert [1.0, 2.0, 3.0] in lines, "training"
    assert [2.0, 3.0] in lines, "held out"
    monkeypatch.undo()
    assert write_run_report(tmp_path / "run").is_file()


def test_an_evaluation_every_zero_epochs_is_refused(small):
    with pytest.raises(RecipeError, match="eval_every must be at least 1, got 0"):
        small(eval_every=0)


def test_the_opening_lines_say_how_often_a_run_is_evaluated(small, tmp_path):
    found = []
    train(small(epochs=2, eval_every=2), tmp_path / "run", on_start=found.append)
    assert "evaluated every 2 epochs" in " ".join(found[0].lines())
