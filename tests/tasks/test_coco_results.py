"""Predictions as JSON and as COCO's results, which pycocotools reads."""

import contextlib
import io
import json

import numpy as np
import pytest
import torch

from interlayer.tasks import TaskError
from interlayer.tasks.coco_results import (
    CocoIds,
    coco_detections,
    coco_label_map,
    describe_detections,
    describe_label_map,
    detections_of,
    label_map_of,
)

CLASSES = ["cat", "dog"]
IMAGE = {"id": 42, "file_name": "photos/a.png", "width": 40, "height": 30}
CATEGORIES = [{"id": 3, "name": "dog"}, {"id": 8, "name": "cat"}]


def found(masks=True):
    boxes = torch.tensor([[2.0, 3, 12, 13], [20, 5, 38, 25.5]])
    values = {"boxes": boxes, "labels": torch.tensor([0, 1]), "scores": torch.tensor([0.25, 0.75])}
    if not masks:
        return values
    probabilities = torch.zeros(2, 1, 30, 40)
    probabilities[0, 0, 3:13, 2:12] = 0.9
    probabilities[1, 0, 5:25, 20:38] = 0.6
    probabilities[1, 0, 5, 20] = 0.4
    return {**values, "masks": probabilities}


@pytest.fixture
def annotations(tmp_path):
    path = tmp_path / "val.json"
    truth = [
        {"id": 1, "image_id": 42, "category_id": 3, "bbox": [20, 5, 18, 20.5], "area": 369, "iscrowd": 0},
        {"id": 2, "image_id": 42, "category_id": 8, "bbox": [2, 3, 10, 10], "area": 100, "iscrowd": 0},
    ]
    path.write_text(json.dumps({"images": [IMAGE], "categories": CATEGORIES, "annotations": truth}))
    return path


def test_a_description_is_plain_and_can_be_turned_back():
    described = json.loads(json.dumps(describe_detections(found(), CLASSES)))
    assert [entry["class"] for entry in described["objects"]] == ["dog", "cat"], "the highest score first"
    again = detections_of(described, CLASSES)
    expected = {key: value[[1, 0]] for key, value in found().items()}
    for key in ("boxes", "labels", "scores"):
        assert torch.equal(again[key], expected[key])
    assert torch.equal(again["masks"], expected["masks"][:, 0] >= 0.5)


def test_nothing_found():
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64), "scores": torch.zeros(0)}
    described = describe_detections(empty, CLASSES)
    assert described == {"objects": []}
    assert detections_of(described, CLASSES)["boxes"].shape == (0, 4)
    assert coco_detections(described, 1, {}) == []


@pytest.mark.parametrize("masks", [False, True])
def test_pycocotools_reads_the_results_with_the_ids_of_the_dataset(annotations, tmp_path, masks):
    coco_api = pytest.importorskip("pycocotools.coco")
    cocoeval = pytest.importorskip("pycocotools.cocoeval")
    ids = CocoIds.read(annotations, ["data/photos/a.png"], CLASSES)
    described = describe_detections(found(masks), CLASSES)
    results = coco_detections(described, ids.images["data/photos/a.png"], ids.categories)
    (tmp_path / "results.json").write_text(json.dumps(results))
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco_api.COCO(str(annotations))
        loaded = truth.loadRes(str(tmp_path / "results.json"))
        evaluation = cocoeval.COCOeval(truth, loaded, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    assert evaluation.stats[0] == pytest.approx(1), "the boxes are those of the truth, with its ids"
    if masks:
        expected = found()["masks"][:, 0] >= 0.5
        for entry in loaded.dataset["annotations"]:
            label = {3: 1, 8: 0}[entry["category_id"]]
            assert (loaded.annToMask(entry) == expected[label].numpy()).all()


def test_ids_count_from_one_without_a_dataset():
    ids = CocoIds.numbered(["b.png", "a.png"], CLASSES)
    assert ids == CocoIds({"b.png": 1, "a.png": 2}, {"cat": 1, "dog": 2})


@pytest.mark.parametrize(
    ("names", "classes", "message"),
    [
        (["b.png"], CLASSES, "has no image b.png: give the COCO file of the images"),
        (["a.png"], CLASSES, "has no image a.png"),
        (["photos/a.png"], ["bird"], "has no category 'bird'"),
    ],
)
def test_images_and_classes_that_the_dataset_lacks_are_named(annotations, names, classes, message):
    with pytest.raises(TaskError, match=message):
        CocoIds.read(annotations, names, classes)


@pytest.mark.parametrize("content", ["[]", "{", '{"images": [1], "categories": []}'])
def test_a_file_that_is_not_coco_is_named(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(TaskError, match=r"x\.json is not a COCO file"):
        CocoIds.read(tmp_path / "x.json", [], [])
    with pytest.raises(TaskError, match=r"y\.json cannot be read: No such file"):
        CocoIds.read(tmp_path / "y.json", [], [])


def test_a_label_map_can_be_described_and_turned_back():
    labels = torch.zeros(6, 8, dtype=torch.int64)
    labels[2:, 3:] = 1
    labels[0, 0] = 255
    described = json.loads(json.dumps(describe_label_map(labels, [*CLASSES, "bird"])))
    assert [entry["class"] for entry in described["classes"]] == ["cat", "dog"]
    assert described["classes"][1]["share"] == round(20 / 48, 5)
    assert (label_map_of(described, [*CLASSES, "bird"]) == labels.numpy()).all()
    mask_api = pytest.importorskip("pycocotools.mask")
    results = coco_label_map(described, 5, {"cat": 1, "dog": 2})
    assert [(entry["image_id"], entry["category_id"]) for entry in results] == [(5, 1), (5, 2)]
    assert (mask_api.decode(results[1]["segmentation"]) == np.asarray(labels == 1)).all()
