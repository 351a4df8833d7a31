"""The evaluation of detections with a record of each image: see `interlayer.tasks.detection`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import roi_align

from .average_precision import AveragePrecisionEvaluator, Sample
from .evaluator import Collective, Scores
from .matching import WRONG, match_detections

RECORDED = 100  # number of detections of an image in the records, if no image has more
CONFIDENT = 0.5  # score of the detections that count for the quality of an image
MASK_SIZE = 28  # height and width of a recorded mask inside its box


def pack_masks(masks: Tensor, boxes: Tensor) -> Tensor:
    """Returns masks [K, H, W] inside their boxes [K, 4], 28 x 28 pixels each, as bits: [K, 98] uint8."""
    if not len(masks):
        return torch.zeros(0, MASK_SIZE**2 // 8, dtype=torch.uint8)
    places = torch.arange(len(masks), device=boxes.device)[:, None].to(boxes)
    inside = roi_align(masks[:, None].float(), torch.cat([places, boxes], dim=1), MASK_SIZE, aligned=True)
    return torch.from_numpy(np.packbits((inside >= 0.5).flatten(1).cpu().numpy(), axis=1))


def unpack_masks(bits: Tensor) -> Tensor:
    """Returns the masks that `pack_masks` packed: booleans [K, 28, 28], each to be resized to its box."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), axis=-1)).bool().view(*bits.shape[:-1], MASK_SIZE, MASK_SIZE)


def detection_quality(found: Sample, truth: Sample) -> float:
    """Returns the F1 of the confident detections of an image; 1 if there are neither objects nor detections.

    Detections are matched in the order of their scores with objects of their class. Crowds are left out.
    """
    sure = found["scores"] >= CONFIDENT
    detections = {key: found[key][sure] for key in ("boxes", "labels", "scores")}
    single = truth["iscrowd"] == 0 if "iscrowd" in truth else torch.ones(len(truth["labels"]), dtype=torch.bool)
    objects = {key: truth[key][single] for key in ("boxes", "labels")}
    hits = int((match_detections(detections, objects) != WRONG).sum())
    total = len(detections["scores"]) + len(objects["labels"])
    return 2 * hits / total if total else 1.0


class DetectionEvaluator(AveragePrecisionEvaluator):
    """Computes COCO's average precision and, if requested, records the detections of each image.

    Args:
        records: whether to record the detections.
        options: those of `AveragePrecisionEvaluator`.
    """

    def __init__(self, *, records: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.keeps_records = records
        self.rows: list[dict[str, Any]] = []

    def update(self, outputs: Sequence[Sample], targets: Any, places: Tensor) -> None:
        super().update(outputs, list(targets), places)
        if self.keeps_records:
            for output, target, place in zip(outputs, targets, places.tolist(), strict=True):
                if place >= 0:
                    self.rows.append(self._row(output, target, place))

    def _row(self, output: Mapping[str, Any], target: Mapping[str, Any], place: int) -> dict[str, Any]:
        found = {key: output[key].detach().float().cpu() for key in ("boxes", "scores")}
        found["labels"] = output["labels"].cpu()
        truth = {key: value.cpu() for key, value in target.items() if key != "masks"}
        row: dict[str, Any] = {"places": place, "quality": detection_quality(found, truth), **found}
        if "mask" in self.kinds:
            row["masks"] = pack_masks(output["masks"].squeeze(1) >= self.threshold, output["boxes"].float())
        return row

    def result(self, collective: Collective) -> Scores:
        scores = super().result(collective)
        if not self.keeps_records:
            return scores
        rows = [row for rank in collective.gather_objects(self.rows) for row in rank]
        return Scores(scores.metrics, scores.count, _stacked(sorted(rows, key=lambda row: row["places"])))


def _stacked(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Returns the records of all images as tensors [N, ...], padded to the same number of detections."""
    if not rows:
        return {}
    most = max(RECORDED, *(len(row["scores"]) for row in rows))
    kinds = {"boxes": (torch.float32, 0), "labels": (torch.int16, -1), "scores": (torch.float16, 0)}
    if "masks" in rows[0]:
        kinds["masks"] = (torch.uint8, 0)
    records = {
        "places": torch.tensor([row["places"] for row in rows]),
        "quality": torch.tensor([row["quality"] for row in rows], dtype=torch.float32),
    }
    for key, (dtype, fill) in kinds.items():
        values = torch.full((len(rows), most, *rows[0][key].shape[1:]), fill, dtype=dtype)
        for index, row in enumerate(rows):
            values[index, : len(row[key])] = row[key].to(dtype)
        records[key] = values
    return records
