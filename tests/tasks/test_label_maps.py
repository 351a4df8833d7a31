"""Mean IoU and accuracy of label maps."""

import math

import pytest
import torch
import torch.nn.functional as F

from interlayer.tasks import Collective
from interlayer.tasks.label_maps import (
    IGNORED,
    LABEL_MAP_METRICS,
    LabelMapEvaluator,
    confusion_matrix,
    label_map_scores,
    label_map_section,
)

LABELS = torch.tensor([[0, 0, 0, 1], [1, 1, IGNORED, 2]])
PREDICTED = torch.tensor([[0, 0, 1, 1], [1, 0, 2, 2]])
COUNTS = [[2, 1, 0, 0], [1, 2, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]  # the fourth class does not occur


def test_known_answers():
    counts = confusion_matrix(PREDICTED, LABELS, 4)
    assert counts.tolist() == COUNTS
    scores = label_map_scores(counts)
    assert scores["miou"] == pytest.approx((2 / 4 + 2 / 4 + 1) / 3)
    assert scores["pixel_accuracy"] == pytest.approx(5 / 7)
    assert scores["class_accuracy"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
    assert set(scores) == {metric.name for metric in LABEL_MAP_METRICS}


def test_a_class_that_is_only_predicted_has_an_iou_of_zero_and_no_accuracy():
    scores = label_map_scores(torch.tensor([[3, 1], [0, 0]]))
    assert scores["miou"] == pytest.approx((3 / 4 + 0) / 2)
    assert scores["class_accuracy"] == pytest.approx(3 / 4)


def test_no_pixels():
    assert all(math.isnan(value) for value in label_map_scores(torch.zeros(3, 3, dtype=torch.int64)).values())


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"shape \(2, 4\), got \(2, 3\)"):
        confusion_matrix(PREDICTED[:, :3], LABELS, 4)


def test_the_section_shows_the_matrix():
    matrix = label_map_section(confusion_matrix(PREDICTED, LABELS, 4), list("abcd")).matrix
    assert matrix.classes == list("abcd")
    assert matrix.counts == COUNTS


def logits_of(predicted, classes=4):
    return F.one_hot(predicted, classes).movedim(-1, -3).float() * 5


def test_the_evaluator_adds_up_images_and_ignores_padding():
    evaluator = LabelMapEvaluator(4, records=True)
    logits = logits_of(torch.stack([PREDICTED, PREDICTED, LABELS.clamp(max=3)]))
    evaluator.update(logits, torch.stack([LABELS] * 3), torch.tensor([1, -1, 0]))
    scores = evaluator.result(Collective())
    assert scores.count == 2
    total = confusion_matrix(PREDICTED, LABELS, 4) + confusion_matrix(LABELS.clamp(max=3), LABELS, 4)
    assert evaluator.counts.tolist() == total.tolist()
    assert {name: scores.metrics[name] for name in label_map_scores(total)} == pytest.approx(label_map_scores(total))
    loss = F.cross_entropy(logits[[0, 2]], torch.stack([LABELS] * 2), ignore_index=IGNORED)
    assert scores.metrics["loss"] == pytest.approx(float(loss))
    expected = torch.tensor([[1.0, 1.0], [2 / 3, 5 / 7]], dtype=torch.float64)
    assert torch.allclose(scores.records["image_scores"], expected)


def test_logits_are_interpolated_to_label_maps_of_any_size():
    evaluator = LabelMapEvaluator(2)
    maps = [torch.zeros(8, 12, dtype=torch.int64), torch.ones(6, 5, dtype=torch.int64)]
    logits = logits_of(torch.tensor([[[0, 0], [0, 0]], [[1, 1], [1, 1]]]), 2)
    evaluator.update(logits, maps, torch.tensor([0, 1]))
    scores = evaluator.result(Collective())
    assert scores.metrics["miou"] == 1
    assert evaluator.counts.tolist() == [[96, 0], [0, 30]]
