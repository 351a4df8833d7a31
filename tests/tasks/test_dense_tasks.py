"""Detectors and segmenters train, are evaluated, resume and are compared through the seam of tasks."""

import csv
import json

import pytest
import torch
from dense_data import HEAD, small_recipe, write_label_maps, write_objects

from interlayer.experiments import TrainedNetwork, evaluate
from interlayer.experiments.trained import read_run
from interlayer.training import train

LOSSES = {
    "detect": ["class_loss", "box_loss", "objectness_loss", "proposal_loss"],
    "instances": ["class_loss", "box_loss", "mask_loss", "objectness_loss", "proposal_loss"],
    "segment": ["pixel_accuracy"],
}


@pytest.fixture(scope="session")
def objects(tmp_path_factory):
    return write_objects(tmp_path_factory.mktemp("objects"))


@pytest.fixture(scope="session")
def label_maps(tmp_path_factory):
    return write_label_maps(tmp_path_factory.mktemp("label_maps"))


@pytest.fixture
def data_of(objects, label_maps):
    return {"detect": objects, "instances": objects, "segment": label_maps}


@pytest.mark.parametrize("task", ["detect", "instances", "segment"])
def test_a_task_trains_writes_its_records_and_evaluates_as_it_tested(task, data_of, tmp_path):
    summary = train(small_recipe(task, data_of[task]), tmp_path / "run")
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    headline = {"detect": "box_ap", "instances": "mask_ap", "segment": "miou"}[task]
    assert all(f"train_{name}" in row for name in LOSSES[task])
    assert ("eval_loss" in row) == (task == "segment") == ("loss" in summary["test"])
    assert f"eval_{headline}" in row
    assert summary["chosen_by"].startswith("validation")
    run = read_run(tmp_path / "run")
    assert len(run.records["quality"]) == summary["test"]["images"] == 4
    if task == "segment":
        assert run.records["prediction"].shape == (4, 64, 64)
        assert run.records["prediction"].dtype == torch.uint8
    else:
        assert run.records["boxes"].shape == (4, 100, 4)
        assert run.records["labels"].dtype == torch.int16
        assert ("masks" in run.records) == (task == "instances")
    trained = TrainedNetwork(tmp_path / "run")
    scores = evaluate(trained)
    for name, value in summary["test"].items():
        assert scores[name] == pytest.approx(value, nan_ok=True)
    assert trained.task.show_details(scores)
    json.dumps(scores, allow_nan=False)


@pytest.mark.slow
def test_a_detector_learns_to_find_the_rectangles(objects, tmp_path):
    """Training images are the test images: boxes, labels, sizes and the metric agree."""
    root = tmp_path / "same"
    root.mkdir()
    (root / "images").symlink_to(objects / "images")
    for split in ("train", "test"):
        (root / f"{split}.json").write_text((objects / "train.json").read_text())
    recipe = small_recipe(
        "detect", root, epochs=1, epoch_steps=150, lr=1e-3, batch_size=8, head_options={**HEAD, "pyramid_channels": 32},
        shorter_side=[60, 60], color_jitter=0, frozen_norms="none", clip_grad=None, weight_decay=0,
    )  # fmt: skip
    summary = train(recipe, tmp_path / "run")
    assert summary["test"]["box_ap50"] > 0.9
