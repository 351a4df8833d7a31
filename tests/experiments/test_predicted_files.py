"""Predictions that are places in images are written as pictures and COCO's results, for any task that draws."""

import io
import json

import numpy as np
import pytest
from bright_spots import BrightSpots
from PIL import Image
from torch import nn

from interlayer.experiments import LoadedNetwork, PredictionFolder, image_files, predict
from interlayer.tasks import TaskError
from interlayer.tasks.drawing import class_color
from interlayer.training import TrainingError
from interlayer.training.data import ImageTransform
from interlayer.training.data.images import EncodedImage
from interlayer.training.recipe import from_values

CLASSES = ["dark", "bright"]
SIDE = 32
BOX = (8, 4, 24, 20)


def spot():
    pixels = np.zeros((SIDE, SIDE, 3), dtype=np.uint8)
    pixels[BOX[1] : BOX[3], BOX[0] : BOX[2]] = 255
    return Image.fromarray(pixels)


@pytest.fixture
def loaded():
    recipe = from_values({"model": "none", "data": "digits", "task": BrightSpots.name, "device": "cpu", "workers": 0})
    task = BrightSpots({}, CLASSES)
    transform = ImageTransform(SIDE, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bilinear", 1.0)
    return LoadedNetwork(recipe, task, nn.Identity(), transform, class_names=None)


@pytest.fixture
def photos(tmp_path):
    for name in ("a/one.png", "b/one.png", "two.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        spot().save(tmp_path / "photos" / name)
    return tmp_path / "photos"


def test_pictures_and_results_of_a_folder_and_of_standard_input(loaded, photos, tmp_path):
    content = io.BytesIO()
    spot().save(content, "PNG")
    files = [*image_files([photos]), EncodedImage("stdin", content.getvalue())]
    folder = PredictionFolder(tmp_path / "found", loaded.task, files)
    predictions = predict(loaded, files)
    folder.write(predictions, min_score=0.5)
    names = sorted(path.name for path in (tmp_path / "found").iterdir())
    assert names == ["images.json", "one.jpg", "one_2.jpg", "results.json", "stdin.jpg", "two.jpg"]
    results = json.loads((tmp_path / "found" / "results.json").read_text())
    images = json.loads((tmp_path / "found" / "images.json").read_text())
    assert [entry["image_id"] for entry in results] == [1, 2, 3, 4] == [entry["id"] for entry in images["images"]]
    assert [entry["file_name"] for entry in images["images"]] == [str(file) for file in files]
    assert {tuple(entry["bbox"]) for entry in results} == {(8, 4, 16, 16)}
    assert images["categories"] == [{"id": 1, "name": "dark"}, {"id": 2, "name": "bright"}]
    assert {entry["category_id"] for entry in results} == {2}
    picture = Image.open(tmp_path / "found" / "stdin.jpg")
    assert picture.width == 480, "a small image is enlarged"
    edge = np.array(picture.getpixel((8 * 15, 12 * 15)), dtype=int)
    assert np.abs(edge - class_color(1)).max() < 60
    table = loaded.task.show_predictions(predictions)
    assert table.rows[-1] == ["stdin", "1", "bright 1"]


def test_objects_of_low_scores_are_not_drawn_but_listed(loaded, photos, tmp_path):
    files = image_files([photos / "two.png"])
    PredictionFolder(tmp_path / "found", loaded.task, files).write(predict(loaded, files), min_score=0.8)
    picture = np.asarray(Image.open(tmp_path / "found" / "two.jpg")).astype(int)
    assert np.abs(picture - picture.mean(axis=2, keepdims=True)).max() < 30, "no colors"
    assert len(json.loads((tmp_path / "found" / "results.json").read_text())) == 1


def test_pycocotools_reads_the_results_with_the_ids_of_the_dataset(loaded, photos, tmp_path):
    coco = pytest.importorskip("pycocotools.coco")
    annotations = tmp_path / "val.json"
    content = {
        "images": [{"id": 77, "file_name": "two.png", "width": SIDE, "height": SIDE}], "annotations": [],
        "categories": [{"id": 5, "name": "bright"}, {"id": 9, "name": "dark"}],
    }  # fmt: skip
    annotations.write_text(json.dumps(content))
    files = image_files([photos / "two.png"])
    folder = PredictionFolder(tmp_path / "found", loaded.task, files, annotations=annotations)
    folder.write(predict(loaded, files), min_score=0.5)
    for truth in (annotations, tmp_path / "found" / "images.json"):
        read = coco.COCO(str(truth)).loadRes(str(tmp_path / "found" / "results.json"))
        (entry,) = read.dataset["annotations"]
        assert (entry["image_id"], entry["category_id"]) == (77, 5)
        assert (read.annToMask(entry) == (np.asarray(spot())[:, :, 0] > 0)).all()


def test_the_command_reads_standard_input_and_names_its_folder(loaded, tmp_path, monkeypatch):
    import typer
    from typer.testing import CliRunner

    from interlayer_cli.predict import predict as command

    monkeypatch.setattr("interlayer.experiments.load_network", lambda *arguments, **options: loaded)
    monkeypatch.chdir(tmp_path)
    app, content = typer.Typer(), io.BytesIO()
    app.command()(command)
    spot().save(content, "PNG")
    result = CliRunner().invoke(app, ["run", "-"], input=content.getvalue())
    assert result.exit_code == 0, result.exception
    assert "bright 1" in result.stdout
    assert "1 pictures and COCO's results.json: predictions" in result.stdout
    assert (tmp_path / "predictions" / "stdin.jpg").is_file()
    result = CliRunner().invoke(app, ["run", "-", "--json", "--output", "other"], input=content.getvalue())
    (found,) = json.loads(result.stdout)
    assert found["image"] == "stdin"
    assert found["objects"][0]["box"] == list(BOX)
    assert (tmp_path / "other" / "results.json").is_file()


def test_what_is_wrong_is_said_before_the_network_runs(loaded, photos, tmp_path):
    files = image_files([photos / "two.png"])
    (tmp_path / "val.json").write_text('{"images": [], "categories": []}')
    with pytest.raises(TaskError, match="has no category 'dark'"):
        PredictionFolder(tmp_path / "found", loaded.task, files, annotations=tmp_path / "val.json")
    spot().save(tmp_path / "same.jpg")
    with pytest.raises(TrainingError, match="is one of the images, and a picture would replace it"):
        PredictionFolder(tmp_path, loaded.task, [tmp_path / "same.jpg"])
    assert not (tmp_path / "found").exists()


def test_a_task_without_places_writes_no_pictures(tmp_path):
    from interlayer.tasks import Classification

    with pytest.raises(TrainingError, match="task=classification draws no predictions: leave --output out"):
        PredictionFolder(tmp_path, Classification({}, CLASSES), [])
