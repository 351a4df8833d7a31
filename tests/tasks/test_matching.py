"""Matching of detections with objects, and precision and recall, checked by COCO's own evaluation."""

import contextlib
import io

import numpy as np
import pytest
import torch

from interlayer.tasks.matching import LEFT_OUT, RECALLS, WRONG, Matches, f1_of, match_detections

CLASSES = 3


def found(boxes, labels, scores):
    return {"boxes": torch.tensor(boxes, dtype=torch.float32).view(-1, 4), "labels": torch.tensor(labels),
            "scores": torch.tensor(scores)}  # fmt: skip


def truth(boxes, labels, crowd=None):
    values = {"boxes": torch.tensor(boxes, dtype=torch.float32).view(-1, 4), "labels": torch.tensor(labels).long()}
    return values if crowd is None else {**values, "iscrowd": torch.tensor(crowd)}


def test_the_highest_score_finds_the_object_and_the_second_is_wrong():
    boxes = [[0, 0, 10, 10], [0, 0, 10, 9], [20, 20, 30, 30], [0, 0, 10, 10]]
    detections = found(boxes, [0, 0, 0, 1], [0.5, 0.9, 0.8, 0.7])
    assert match_detections(detections, truth([[0, 0, 10, 10], [40, 40, 50, 50]], [0, 0])).tolist() == [
        WRONG, 0, WRONG, WRONG,
    ]  # fmt: skip


def test_detections_in_a_crowd_are_left_out():
    detections = found([[2, 2, 6, 6], [7, 7, 9, 9], [30, 30, 40, 40]], [0, 0, 0], [0.9, 0.8, 0.7])
    objects = truth([[0, 0, 10, 10], [2, 2, 6, 6]], [0, 0], [1, 0])
    assert match_detections(detections, objects).tolist() == [1, LEFT_OUT, WRONG]
    matches = Matches.of([detections], [objects], CLASSES)
    assert matches.counts(0).tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("detections", [found([], [], []), found([[0, 0, 5, 5]], [1], [0.5])])
@pytest.mark.parametrize("objects", [truth([], []), truth([[0, 0, 5, 5]], [1])])
def test_nothing_to_match(detections, objects):
    matches = Matches.of([detections], [objects], CLASSES)
    both = len(detections["labels"]) * len(objects["labels"])
    right, wrong, total = matches.counts(0)[0]
    assert (right, total) == (both, len(objects["labels"]))
    assert wrong == len(detections["labels"]) - both
    assert f1_of(matches.counts(0))[0] == (1 if len(detections["labels"]) == len(objects["labels"]) else 0)
    if len(objects["labels"]):
        assert matches.precision(1).mean() == both
    assert matches.precision(2) is None


def random_sets(images=12, seed=0):
    generator = np.random.default_rng(seed)
    truths, detections = [], []
    for _ in range(images):
        count = generator.integers(0, 8)
        corners = generator.random((count, 2)) * 80
        boxes = np.concatenate([corners, corners + 8 + generator.random((count, 2)) * 20], axis=1)
        labels = generator.integers(0, CLASSES, count)
        truths.append(truth(boxes.tolist(), labels.tolist(), (generator.random(count) < 0.1).astype(int).tolist()))
        jitter = boxes + generator.normal(0, 2.5, boxes.shape)
        extra = generator.random((4, 2)) * 80
        guessed = np.concatenate([jitter, np.concatenate([extra, extra + 15], axis=1)])
        found_labels = np.concatenate([labels, generator.integers(0, CLASSES, 4)])
        detections.append(found(guessed.tolist(), found_labels.tolist(), generator.random(len(guessed)).tolist()))
    return detections, truths


def test_ap50_and_precision_are_those_of_pycocotools():
    coco_api, cocoeval = pytest.importorskip("pycocotools.coco"), pytest.importorskip("pycocotools.cocoeval")
    detections, truths = random_sets()

    def entries(sets, key):
        for image, entry in enumerate(sets):
            for index, (box, label) in enumerate(zip(entry["boxes"].tolist(), entry["labels"].tolist(), strict=True)):
                box = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
                yield {"image_id": image, "category_id": label, "bbox": box, "area": box[2] * box[3],
                       key: float(entry[key][index])}  # fmt: skip

    content = {
        "images": [{"id": image} for image in range(len(truths))],
        "categories": [{"id": label} for label in range(CLASSES)],
        "annotations": [{**entry, "id": number} for number, entry in enumerate(entries(truths, "iscrowd"), start=1)],
    }
    coco = coco_api.COCO()
    coco.dataset = content
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
        results = [{**entry, "score": entry["scores"]} for entry in entries(detections, "scores")]
        evaluation = cocoeval.COCOeval(coco, coco.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    theirs = evaluation.eval["precision"][0, :, :, 0, 2]  # at an IoU of 0.5: [recalls, classes]
    matches = Matches.of(detections, truths, CLASSES)
    for label in range(CLASSES):
        assert matches.precision(label) == pytest.approx(theirs[:, label])
    assert len(RECALLS) == len(theirs)


def test_the_best_score_has_the_highest_f1():
    detections, truths = random_sets(seed=3)
    matches = Matches.of(detections, truths, CLASSES)
    best = matches.best_score()

    def f1(score):
        right, wrong, objects = matches.counts(score).sum(axis=0)
        return 2 * right / (right + wrong + objects)

    assert f1(best) == max(f1(score) for score in matches.scores)
    assert Matches.of([found([], [], [])], [truths[0]], CLASSES).best_score() == 0.5
