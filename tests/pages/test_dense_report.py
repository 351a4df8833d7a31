"""Runs of detection, instance and semantic segmentation are reported and predict, from the command to the pictures."""

import base64
import dataclasses
import json

import pytest
from dense_data import small_recipe, write_label_maps, write_objects
from PIL import Image
from typer.testing import CliRunner

from interlayer.experiments import compare
from interlayer.pages import write_comparison_report, write_run_report
from interlayer.pages.figures import curves
from interlayer.tasks import Detection
from interlayer.training import load_recipe, train

SECTIONS = {
    "detect": ["Predictions beside the truth", "Worst images", "Precision and recall"],
    "instances": ["Predictions beside the truth", "Worst images", "Precision and recall"],
    "segment": ["Predictions beside the truth", "Worst images", "IoU of the classes", "Confusion"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    objects = write_objects(tmp_path_factory.mktemp("objects"))
    label_maps = write_label_maps(tmp_path_factory.mktemp("label_maps"))
    return {"detect": objects, "instances": objects, "segment": label_maps}


def predicted(run, *arguments):
    import typer

    from interlayer_cli.predict import predict

    app = typer.Typer()
    app.command()(predict)
    result = CliRunner().invoke(app, [str(run), *map(str, arguments)])
    assert result.exit_code == 0, result.exception
    return result.stdout


@pytest.mark.parametrize("task", [pytest.param("detect", marks=pytest.mark.slow), "instances", "segment"])
def test_a_run_is_reported_and_predicts(task, data, tmp_path):
    if task != "segment":
        pytest.importorskip("faster_coco_eval")
    root, run, output = data[task], tmp_path / "run", tmp_path / "found"
    train(small_recipe(task, root), run)
    page = write_run_report(run).read_text()
    assert [title for title in SECTIONS[task] if f"<h2>{title}</h2>" in page] == SECTIONS[task]
    assert page.count("data:image/jpeg") >= 8, "four images and their truth"
    images = root / "images" if task != "segment" else root / "images" / "test"
    files = sorted(images.glob("*.png"))[:3]
    ids = [] if task == "segment" else ["--annotations", root / "test.json"]
    if ids:
        files = sorted(images.glob("test*.png"))
    text = predicted(run, *files, "--output", output, "device=cpu", *ids)
    assert f"{len(files)} pictures and COCO's results.json" in text
    results = json.loads((output / "results.json").read_text())
    entries = {entry["id"]: entry for entry in json.loads((output / "images.json").read_text())["images"]}
    assert {entry["image_id"] for entry in results} <= set(entries)
    for entry in results:
        image = entries[entry["image_id"]]
        if task != "detect":
            assert entry["segmentation"]["size"] == [image["height"], image["width"]]
        if task != "segment":
            left, top, width, height = entry["bbox"]
            assert left >= 0
            assert top >= 0
            assert left + width <= image["width"] + 0.01
            assert top + height <= image["height"] + 0.01
    if ids:
        assert set(entries) == {0, 1, 2, 3}, "the ids of test.json"
        coco = pytest.importorskip("pycocotools.coco")
        if results:
            coco.COCO(str(root / "test.json")).loadRes(str(output / "results.json"))
    else:
        assert len(results) >= len(files)
    for file in files:
        with Image.open(file) as original, Image.open(output / f"{file.stem}.jpg") as picture:
            assert max(picture.size) >= 480 > max(original.size)


def test_curves_of_any_headline_metric_have_the_interval_over_seeds(tmp_path):
    """The shaded interval needs three seeds."""
    task = Detection(dataclasses.asdict(load_recipe("finetune_detection")), ["cell"])
    folders = []
    for seed in range(3):
        folders.append(tmp_path / str(seed))
        folders[-1].mkdir()
        rows = [f"{epoch},{1 / epoch},{0.1 * epoch + 0.01 * seed}" for epoch in (1, 2, 3)]
        (folders[-1] / "metrics.csv").write_text("\n".join(["epoch,train_loss,eval_box_ap", *rows]) + "\n")

    def figure(runs):
        (shown,) = [figure for figure in curves(task, {"net": runs}) if figure.alt == "Box AP over epochs"]
        return base64.b64decode(shown.source.partition(",")[2]).decode()

    assert "FillBetweenPolyCollection" in figure(folders)
    assert "FillBetweenPolyCollection" not in figure(folders[:2])


@pytest.mark.slow
def test_a_comparison_is_reported(data, tmp_path):
    recipe = small_recipe("segment", data["segment"])
    comparison = compare(recipe, ["resnet10t", "resnet10t+mrla_light"], tmp_path, seeds=[0])
    page = write_comparison_report(comparison).read_text()
    for title in ("Where they differ most", "IoU of the classes", "Confusion of resnet10t, first seed"):
        assert f"<h2>{title}</h2>" in page
    assert 'alt="mIoU over epochs"' in page
