"""Average precision, with pycocotools as the oracle."""

import builtins
import contextlib
import io
import math

import numpy as np
import pytest
import torch
from torchvision.ops import masks_to_boxes

from interlayer.tasks import Collective, TaskError
from interlayer.tasks.average_precision import AveragePrecisionEvaluator, average_precision_metrics

SIZE = 160  # objects of up to 120 pixels are small, medium and large
NAMES = ["ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large"]


def ellipse(generator, largest):
    rows, columns = np.mgrid[:SIZE, :SIZE]
    center = generator.uniform(20, SIZE - 20, 2)
    radii = generator.uniform(5, largest / 2, 2)
    return ((rows - center[0]) / radii[0]) ** 2 + ((columns - center[1]) / radii[1]) ** 2 <= 1


def shifted(mask, generator, most):
    return np.roll(mask, generator.integers(-most, most + 1, 2), (0, 1))


def entries(masks, labels, **more):
    masks = torch.from_numpy(np.stack(masks)) if masks else torch.zeros(0, SIZE, SIZE, dtype=torch.bool)
    boxes = masks_to_boxes(masks) + torch.tensor([0, 0, 1, 1]) if len(masks) else torch.zeros(0, 4)
    return {"masks": masks, "boxes": boxes, "labels": torch.tensor(labels, dtype=torch.int64), **more}


@pytest.fixture(scope="module")
def detections():
    """Outputs and targets of 12 images with three classes, one image without objects, and crowds."""
    generator = np.random.default_rng(0)
    outputs, targets = [], []
    for index in range(12):
        count = 0 if index == 5 else int(generator.integers(1, 6))
        truth = [ellipse(generator, [30, 90, 140][i % 3]) for i in range(count)]
        labels = generator.integers(0, 3, count).tolist()
        areas = torch.tensor([mask.sum() for mask in truth], dtype=torch.float32)
        crowd = torch.tensor([int(i == 4) for i in range(count)], dtype=torch.int64)
        targets.append(entries(truth, labels, area=areas, iscrowd=crowd))
        found = [shifted(mask, generator, 6) for mask in truth] + [ellipse(generator, 60) for _ in range(2)]
        answers = [*labels, *generator.integers(0, 3, 2).tolist()]
        scores = torch.from_numpy(generator.random(len(found))).float()
        outputs.append(entries(found, answers, scores=scores))
    return outputs, targets


def oracle(outputs, targets, kind):
    """The first six figures of pycocotools."""
    coco_module, eval_module = pytest.importorskip("pycocotools.coco"), pytest.importorskip("pycocotools.cocoeval")
    from pycocotools import mask as api

    def rows(samples):
        for image, sample in enumerate(samples):
            for number in range(len(sample["labels"])):
                left, top, right, bottom = sample["boxes"][number].tolist()
                encoded = api.encode(np.asfortranarray(sample["masks"][number].numpy().astype(np.uint8)))
                row = {"image_id": image, "category_id": int(sample["labels"][number]), "segmentation": encoded}
                row["bbox"] = [left, top, right - left, bottom - top]
                if "scores" in sample:
                    yield row | {"score": float(sample["scores"][number])}
                else:
                    crowd = int(sample["iscrowd"][number])
                    yield row | {"area": float(sample["area"][number]), "iscrowd": crowd}

    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco_module.COCO()
        truth.dataset = {
            "images": [{"id": i, "height": SIZE, "width": SIZE} for i in range(len(targets))],
            "categories": [{"id": i, "name": str(i)} for i in range(3)],
            "annotations": [{"id": number, **row} for number, row in enumerate(rows(targets), start=1)],
        }
        truth.createIndex()
        found = [{key: row[key] for key in row if key != ("bbox" if kind == "segm" else "segmentation")}
                 for row in rows(outputs)]  # fmt: skip
        evaluation = eval_module.COCOeval(truth, truth.loadRes(found), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats[:6]


def evaluate(outputs, targets, **options):
    evaluator = AveragePrecisionEvaluator(**options)
    for start in range(0, len(outputs), 5):
        places = torch.arange(start, min(start + 5, len(outputs)))
        evaluator.update(outputs[start : start + 5], targets[start : start + 5], places)
    return evaluator.result(Collective())


def test_boxes_and_masks_have_the_figures_of_pycocotools(detections):
    pytest.importorskip("faster_coco_eval")
    scores = evaluate(*detections, masks=True)
    assert scores.count == 12
    for kind, theirs in (("box", "bbox"), ("mask", "segm")):
        expected = oracle(*detections, theirs)
        assert (expected > 0).all()
        assert (expected[1:] < 1).all()
        assert [scores.metrics[f"{kind}_{name}"] for name in NAMES] == pytest.approx(list(expected), abs=1e-6)
        assert {metric.name for metric in average_precision_metrics(kind)} == {f"{kind}_{name}" for name in NAMES}


def test_boxes_alone(detections):
    pytest.importorskip("faster_coco_eval")
    metrics = evaluate(*detections).metrics
    expected = oracle(*detections, "bbox")
    assert [metrics[f"box_{name}"] for name in NAMES] == pytest.approx(list(expected), abs=1e-6)
    assert not any(name.startswith("mask") for name in metrics)


class Ranks(Collective):
    """Stands for ranks whose values are known."""

    def __init__(self, others):
        self.others = others

    def gather_objects(self, value):
        return [value, *self.others]


class Captured(Collective):
    def gather_objects(self, value):
        self.value = value
        return [value]


@pytest.mark.parametrize("split", [0, 5, 12])
def test_ranks_with_different_numbers_of_images_are_merged(detections, split):
    pytest.importorskip("faster_coco_eval")
    outputs, targets = detections
    first, second = (AveragePrecisionEvaluator(masks=True) for _ in range(2))
    first.update(outputs[:split], targets[:split], torch.arange(split))
    second.update(outputs[split:], targets[split:], torch.arange(split, 12))
    captured = Captured()
    second.result(captured)
    merged, whole = first.result(Ranks([captured.value])), evaluate(outputs, targets, masks=True)
    assert merged.count == 12
    assert merged.metrics == pytest.approx(whole.metrics, nan_ok=True)


def perfect(count):
    boxes = torch.tensor([[i * 12.0, 0, i * 12 + 10, 10] for i in range(count)])
    labels = torch.zeros(count, dtype=torch.int64)
    return {"boxes": boxes, "labels": labels, "scores": torch.linspace(1, 0.5, count)}


def test_known_answers_and_padding():
    pytest.importorskip("faster_coco_eval")
    evaluator = AveragePrecisionEvaluator()
    evaluator.update([perfect(2), perfect(3)], [perfect(2), perfect(1)], torch.tensor([0, -1]))
    scores = evaluator.result(Collective())
    assert scores.count == 1  # the second is padding
    assert scores.metrics["box_ap"] == scores.metrics["box_ap50"] == pytest.approx(1)
    assert math.isnan(scores.metrics["box_ap_large"])  # there are no large objects
    missed = evaluate([perfect(1)], [perfect(2)]).metrics["box_ap50"]
    assert missed == pytest.approx(51 / 101)  # recall reaches 0.5: thresholds 0, 0.01, ..., 0.5


def test_more_detections_than_cocos_count_if_asked_for():
    pytest.importorskip("faster_coco_eval")
    many = perfect(150)
    assert evaluate([many], [many]).metrics["box_ap50"] == pytest.approx(67 / 101)  # recall reaches 100 / 150
    assert evaluate([many], [many], max_detections=200).metrics["box_ap50"] == pytest.approx(1)


def test_probabilities_of_masks_are_cut_at_the_threshold(detections):
    pytest.importorskip("faster_coco_eval")
    outputs, targets = detections
    soft = [{**output, "masks": output["masks"][:, None] * 0.6} for output in outputs]
    hard = evaluate(outputs, targets, masks=True).metrics["mask_ap"]
    assert evaluate(soft, targets, masks=True).metrics["mask_ap"] == pytest.approx(hard)
    assert evaluate(soft, targets, masks=True, threshold=0.7).metrics["mask_ap"] < hard


def test_no_images():
    pytest.importorskip("faster_coco_eval")
    scores = AveragePrecisionEvaluator().result(Collective())
    assert scores.count == 0
    assert math.isnan(scores.metrics["box_ap"])


def test_the_missing_extra_is_named(monkeypatch):
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("faster_coco_eval"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(TaskError, match=r"interlayer\[detection\]"):
        AveragePrecisionEvaluator()
