"""Mean intersection over union and accuracy of label maps, from a confusion matrix of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .evaluator import Collective, Evaluator, Scores
from .metric import Metric
from .show import Matrix, Section

IGNORED = 255  # the label of pixels that are not counted
LABEL_MAP_METRICS = (
    Metric("miou", percent=True, label="mIoU"),
    Metric("pixel_accuracy", percent=True),
    Metric("class_accuracy", percent=True),
)


def confusion_matrix(predicted: Tensor, labels: Tensor, classes: int, *, ignored: int = IGNORED) -> Tensor:
    """Counts pixels by their true and their predicted class.

    Args:
        predicted: predicted classes, whole numbers of any shape.
        labels: true classes, of the same shape.
        classes: number of classes.
        ignored: the label of pixels that are not counted.

    Returns:
        counts, int64 [classes, classes]: rows are true classes, columns predicted ones.
    """
    if predicted.shape != labels.shape:
        raise ValueError(f"expected predictions of the shape {tuple(labels.shape)}, got {tuple(predicted.shape)}")
    counted = labels != ignored
    pairs = labels[counted].long() * classes + predicted[counted].long()
    return torch.bincount(pairs, minlength=classes * classes).view(classes, classes)


def label_map_scores(counts: Tensor) -> dict[str, float]:
    """Returns mean IoU, pixel accuracy and mean class accuracy from a confusion matrix.

    Classes that are neither in the label maps nor predicted have no IoU, and classes that are not in the label maps
    have no accuracy: they are left out of the means.
    """
    ious, accuracies = class_scores(counts)
    total = counts.sum()
    return {
        "miou": float(ious.nanmean()),
        "pixel_accuracy": float(counts.diagonal().sum() / total) if total else float("nan"),
        "class_accuracy": float(accuracies.nanmean()),
    }


def class_scores(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the IoU and the accuracy of each class, float64 [classes]; NaN for classes that have none."""
    counts = counts.double()
    hits, truth = counts.diagonal(), counts.sum(dim=1)
    return hits / (truth + counts.sum(dim=0) - hits), hits / truth


def label_map_section(counts: Tensor, classes: Sequence[str], *, title: str = "Confusion") -> Section:
    """Returns the confusion matrix of pixels for a report."""
    text = "The number of pixels of each class by the predicted class, and their share of the true class."
    return Section(title, text, matrix=Matrix(list(classes), counts.tolist(), "true class", "predicted class"))


class LabelMapEvaluator(Evaluator):
    """Computes cross-entropy, mean IoU and accuracy of label maps. See `label_map_scores`.

    The outputs of a batch are logits [B, classes, h, w], interpolated to the size of the label maps [B, H, W], which
    are of the original size. The label maps of a batch may also be a list [H, W] of different sizes.

    Records:
        image_scores: [N, 2], the mean IoU and the pixel accuracy of each image.

    Attributes:
        counts: the confusion matrix of all pixels of this rank, or of all ranks after `result`.
        image_counts: the confusion matrices of single images, if there are records.
    """

    def __init__(self, classes: int, *, ignored: int = IGNORED, records: bool = False) -> None:
        self.classes, self.ignored, self.keeps_records = classes, ignored, records
        self.counts: Tensor | None = None
        self.totals: Tensor | None = None  # [sum of losses of pixels, number of images], float64
        self.places: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.image_counts: list[Tensor] = []

    def update(self, outputs: Tensor, targets: Tensor | Sequence[Tensor], places: Tensor) -> None:
        for logits, labels, place in zip(outputs, targets, places, strict=True):
            self._add(logits.float()[None], labels.as_subclass(Tensor)[None].long(), place)

    def _add(self, logits: Tensor, labels: Tensor, place: Tensor) -> None:
        """Adds an image: logits [1, classes, h, w] and labels [1, H, W]."""
        if logits.shape[-2:] != labels.shape[-2:]:
            logits = F.interpolate(logits, size=labels.shape[-2:], mode="bilinear", align_corners=False)
        counted = place >= 0
        counts = confusion_matrix(logits.argmax(dim=1), labels, self.classes, ignored=self.ignored)
        loss = F.cross_entropy(logits, labels, ignore_index=self.ignored, reduction="sum")
        counts, totals = counts * counted, torch.stack([loss.double() * counted, counted.double()])
        self.counts = counts if self.counts is None else self.counts + counts
        self.totals = totals if self.totals is None else self.totals + totals
        if self.keeps_records:
            hits = counts.diagonal().sum() / counts.sum()
            self.places.append(place)
            self.scores.append(torch.stack([class_scores(counts)[0].nanmean(), hits.double()]))
            self.image_counts.append(counts)

    def result(self, collective: Collective) -> Scores:
        assert self.counts is not None, "update was never called"
        assert self.totals is not None
        self.counts = collective.sum(self.counts)
        loss, images = collective.sum(self.totals).tolist()
        pixels = int(self.counts.sum())
        metrics: dict[str, Any] = {"loss": loss / pixels if pixels else float("nan"), **label_map_scores(self.counts)}
        records: dict[str, Tensor] = {}
        if self.keeps_records:
            places = collective.gather(torch.stack(self.places))
            rows = collective.gather(torch.stack(self.scores))
            order = torch.argsort(places)
            records["image_scores"] = rows[order[places[order] >= 0]].cpu()
        return Scores(metrics, int(images), records)
