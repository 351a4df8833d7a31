"""Which detections are right: they are matched with the true objects of their class at an IoU of 0.5, as COCO does.

Precision is the share of the detections above a score that are right, and recall the share of the objects that they
find. Average precision at an IoU of 0.5 (AP50) is the mean over 101 recalls of the highest precision at that recall or
a higher one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import box_area, box_iou

MATCHED = 0.5  # IoU from which a detection finds an object
RECALLS = np.linspace(0, 1, 101)
WRONG, LEFT_OUT = -1, -2  # a detection that finds nothing, and one that finds a crowd, which is not counted


def match_detections(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> np.ndarray:
    """Matches the detections of an image with its objects, in the order of their scores.

    Args:
        found: boxes [K, 4], labels [K] and scores [K].
        truth: boxes [N, 4], labels [N] and, optionally, iscrowd [N].

    Returns:
        For each detection the index of the object that it finds, `WRONG` or `LEFT_OUT`: [K].
    """
    boxes, objects = _plain(found["boxes"]), _plain(truth["boxes"])
    same = (_plain(found["labels"])[:, None] == _plain(truth["labels"])[None]).numpy()
    crowd = _crowds(truth)
    overlaps = box_iou(boxes, objects).numpy() * same
    matches = np.full(len(boxes), WRONG)
    free = overlaps * ~crowd
    if crowd.any():  # the share of the detection that is inside the crowd
        inside = _intersection(boxes, objects) / box_area(boxes).clamp_min(1e-6)[:, None]
        in_crowd = ((inside.numpy() * same * crowd) >= MATCHED).any(axis=1)
    else:
        in_crowd = np.zeros(len(boxes), dtype=bool)
    for index in np.argsort(-_plain(found["scores"]).float().numpy(), kind="stable"):
        best = free[index].argmax() if free.shape[1] else 0
        if free.shape[1] and free[index, best] >= MATCHED:
            matches[index] = best
            free[:, best] = 0
        elif in_crowd[index]:
            matches[index] = LEFT_OUT
    return matches


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().as_subclass(Tensor).cpu()


def _crowds(truth: Mapping[str, Any]) -> np.ndarray:
    crowd = truth.get("iscrowd")
    return np.zeros(len(truth["labels"]), dtype=bool) if crowd is None else _plain(crowd).bool().numpy()


def _intersection(boxes: Tensor, others: Tensor) -> Tensor:
    """Returns the areas in which boxes [K, 4] and others [N, 4] overlap: [K, N]."""
    low = torch.maximum(boxes[:, None, :2], others[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], others[None, :, 2:])
    return (high - low).clamp_min(0).prod(dim=2)


@dataclass(frozen=True)
class Matches:
    """The detections of several images with the objects that they find.

    Args:
        images: [M], the position of the image of each detection.
        labels: [M], the class of each detection.
        scores: [M].
        right: [M], whether each detection finds an object. Those that find a crowd are not among the detections.
        objects: [images, classes], the number of objects.
    """

    images: np.ndarray
    labels: np.ndarray
    scores: np.ndarray
    right: np.ndarray
    objects: np.ndarray

    @classmethod
    def of(cls, found: Sequence[Mapping[str, Tensor]], truths: Sequence[Mapping[str, Any]], classes: int) -> Matches:
        """Matches the detections of each image with its true objects."""
        images, labels, scores, right = [], [], [], []
        objects = np.zeros((len(truths), classes), dtype=np.int64)
        for position, (detections, truth) in enumerate(zip(found, truths, strict=True)):
            matches = match_detections(detections, truth)
            counted = matches != LEFT_OUT
            images.append(np.full(counted.sum(), position))
            labels.append(_plain(detections["labels"]).numpy()[counted])
            scores.append(_plain(detections["scores"]).float().numpy()[counted])
            right.append(matches[counted] >= 0)
            single = _plain(truth["labels"]).numpy()[~_crowds(truth)]
            objects[position] = np.bincount(single, minlength=classes)[:classes]
        return cls(*map(np.concatenate, (images, labels, scores, right)), objects=objects)  # type: ignore[misc]

    def best_score(self) -> float:
        """Returns the lowest score of the detections that have the highest F1 together; 0.5 if none is right."""
        if not self.right.any():
            return 0.5
        order = np.argsort(-self.scores, kind="stable")
        f1 = 2 * self.right[order].cumsum() / (np.arange(1, len(order) + 1) + self.objects.sum())
        return float(self.scores[order[f1.argmax()]])

    def counts(self, min_score: float) -> np.ndarray:
        """Returns the numbers of right and wrong detections of at least ``min_score``, and of objects: [images, 3]."""
        kept = self.scores >= min_score
        size = len(self.objects)
        right = np.bincount(self.images[kept & self.right], minlength=size)
        wrong = np.bincount(self.images[kept & ~self.right], minlength=size)
        return np.stack([right, wrong, self.objects.sum(axis=1)], axis=1)

    def precision(self, label: int) -> np.ndarray | None:
        """Returns the precision of a class at each of `RECALLS`; None if there are no objects of it."""
        total = self.objects[:, label].sum()
        if not total:
            return None
        of_class = self.labels == label
        order = np.argsort(-self.scores[of_class], kind="stable")
        hits = self.right[of_class][order].cumsum()
        precision = hits / np.arange(1, len(hits) + 1)
        envelope = np.maximum.accumulate(precision[::-1])[::-1]
        places = np.searchsorted(hits / total, RECALLS, side="left")
        return np.where(places < len(envelope), np.append(envelope, 0)[np.minimum(places, len(envelope))], 0.0)


def f1_of(counts: np.ndarray) -> np.ndarray:
    """Returns the F1 of each image from `Matches.counts`; 1 if there are neither objects nor detections."""
    right, total = counts[:, 0], counts.sum(axis=1)
    return np.divide(2 * right, total, out=np.ones(len(counts)), where=total > 0)
