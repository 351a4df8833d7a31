"""Semantic segmentation: one class for each pixel.

An evaluation with records writes, for each image:

    ============  ======================  =============================================================
    prediction    [N, H, W] uint8         the predicted classes, reduced to at most 256 pixels a side and
                                          padded with 255 at the right and at the bottom
    quality       [N] float32             the mean IoU of the classes of the image
    image_scores  [N, 2] float64          the mean IoU and the pixel accuracy
    places        [N] int64               the index of each image in its source
    class_pixels  [N, 3, classes] int64   the pixels of each class: predicted correctly, true, predicted
    confusion     [N, classes, classes]   the pixels by true and predicted class, int32, if there are few classes
    ============  ======================  =============================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from ..models.dense import segmenter
from ..models.dense.padded import resize_image
from .coco_results import coco_label_map, describe_label_map, label_map_of, label_map_table
from .confusion import MATRIX_CLASSES
from .dense import DenseTask, plain
from .drawing import draw_label_map
from .evaluator import Collective, Scores
from .label_map_sections import label_map_comparison_sections, label_map_run_sections
from .label_maps import IGNORED, LABEL_MAP_METRICS, LabelMapEvaluator
from .padded import PaddedTargets, pad_together, sizes_of
from .show import MIN_SCORE, FinishedRun, ImageSource, Section, Table

AUXILIARY_WEIGHT = 0.4  # of the loss of the auxiliary head
RECORDED_SIDE = 256  # largest height and width of a recorded label map


class Segmentation(DenseTask):
    """Trains with cross-entropy over pixels and measures the mean intersection over union."""

    name = "segment"
    headline = LABEL_MAP_METRICS[0]
    train_metrics = (LABEL_MAP_METRICS[1],)
    eval_metrics = LABEL_MAP_METRICS
    annotations = "label_maps"
    draws = True

    @classmethod
    def recipe_name(cls) -> str:
        return "finetune_segmentation"

    @classmethod
    def unsupported_reason(cls, values: Mapping[str, Any]) -> str:
        if values["detector"]:
            return f"task={cls.name} takes a segmenter, not detector={values['detector']}"
        return super().unsupported_reason(values)

    @property
    def fixed_size(self) -> bool:
        return self.values["crop"] != "none"

    @property
    def head_name(self) -> str:
        return self.values["segmenter"]

    def build(self) -> nn.Module:
        return self.build_dense(segmenter, self.values["segmenter"])

    def backbone(self, network: nn.Module) -> nn.Module:
        return network.body  # type: ignore[return-value]

    def target_of(self, target: Any, image: Tensor) -> Tensor:
        if not isinstance(target, Tensor):
            return torch.full(image.shape[1:], IGNORED, dtype=torch.uint8)
        return plain(target).to(torch.uint8)  # an eighth of the bytes that are copied to the device

    def example_targets(self, images: Tensor) -> PaddedTargets:
        """Returns label maps of the first class."""
        size = images.shape[-2], images.shape[-1]
        labels = torch.zeros(size, dtype=torch.uint8, device=images.device)
        return PaddedTargets([size] * len(images), [labels] * len(images))

    def forward(self, model: Any, images: Tensor, targets: Any = None) -> Any:
        """Returns the logits of the model in training; in evaluation those of each image, [classes, h, w].

        Images of an evaluation are resized here. Those of different sizes are padded with zeros.
        """
        sizes = sizes_of(images, targets)
        if model.training:
            return model(_without_padding(images, sizes))
        resized = [
            resize_image(image[:, :height, :width], *self.evaluated_sides)
            for image, (height, width) in zip(images, sizes, strict=True)
        ]
        logits = model(_in_layout_of(images, pad_together(resized)))
        return [each[:, : image.shape[1], : image.shape[2]] for each, image in zip(logits, resized, strict=True)]

    def loss(self, outputs: Any, targets: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the mean cross-entropy of all pixels with a class, and of the auxiliary head."""
        logits, *auxiliary = outputs if isinstance(outputs, tuple) else (outputs,)
        labels = pad_together(list(targets), IGNORED).long()
        counted = labels != IGNORED
        pixels = counted.sum().clamp_min(1)  # a crop may have none

        def cross_entropy(logits: Tensor) -> Tensor:
            smoothing = self.values["label_smoothing"]
            total = F.cross_entropy(
                logits.float(), labels, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
            )
            return total / pixels

        loss = cross_entropy(logits)
        for other in auxiliary:
            loss = loss + AUXILIARY_WEIGHT * cross_entropy(other)
        right = ((logits.detach().argmax(dim=1) == labels) & counted).sum() / pixels
        return loss, {"pixel_accuracy": right * len(labels)}

    def evaluation_loss(self, outputs: Any, targets: Any) -> Tensor:
        """Computes the cross-entropy of all pixels, with logits interpolated to the size of the label maps."""
        losses = [
            F.cross_entropy(
                _resized(logits, labels.shape)[None].float(), labels[None].long(), ignore_index=IGNORED, reduction="sum"
            )
            for logits, labels in zip(outputs, targets, strict=True)
        ]
        return torch.stack(losses).sum()

    def evaluator(self, *, records: bool = False) -> SegmentationEvaluator:
        return SegmentationEvaluator(len(self.classes), records=records)

    # Reports

    def details(self, scores: Scores) -> dict[str, Any]:
        """Returns the IoU and the accuracy of every class."""
        hits, truth, predicted = scores.records["class_pixels"].sum(dim=0).double()
        ious, accuracies = hits / (truth + predicted - hits), hits / truth
        rows = zip(self.classes, truth.long().tolist(), ious.tolist(), accuracies.tolist(), strict=True)
        return {
            "classes": [
                {"class": name, "pixels": count, "iou": _known(iou), "accuracy": _known(accuracy)}
                for name, count, iou, accuracy in rows
            ]
        }

    def show_details(self, evaluation: Mapping[str, Any]) -> list[Table]:
        rows = [
            [entry["class"], f"{entry['pixels']:,}", *(_percent(entry[key]) for key in ("iou", "accuracy"))]
            for entry in evaluation["classes"]
        ]
        return [*super().show_details(evaluation), Table("", ["class", "pixels", "IoU", "accuracy"], rows)]

    def predictions(self, outputs: Sequence[Tensor], top: int, targets: Any = None) -> list[dict[str, Any]]:
        """Returns the classes of the pixels of each image, in its original size if the targets hold it."""
        sizes = targets.sizes if isinstance(targets, PaddedTargets) else [logits.shape[-2:] for logits in outputs]
        return [
            describe_label_map(_resized(logits, size).argmax(dim=0), self.classes)
            for logits, size in zip(outputs, sizes, strict=True)
        ]

    def show_predictions(self, found: Sequence[Mapping[str, Any]]) -> Table:
        return label_map_table(found)

    def draw(self, image: Image.Image, prediction: Mapping[str, Any], *, min_score: float = MIN_SCORE) -> Image.Image:
        return draw_label_map(image, label_map_of(prediction, self.classes), self.classes)

    def coco_results(
        self, prediction: Mapping[str, Any], image_id: int, categories: Mapping[str, int]
    ) -> list[dict[str, Any]]:
        return coco_label_map(prediction, image_id, categories)

    def show_run(self, run: FinishedRun, images: ImageSource | None) -> list[Section]:
        """Shows predictions beside the truth, the worst images, the IoU of the classes and their confusion."""
        return label_map_run_sections(run, images, self.classes)

    def show_comparison(self, runs: Sequence[FinishedRun], images: ImageSource | None) -> list[Section]:
        """Shows the images on which the first two networks differ most, the IoU of the classes and their confusion."""
        return label_map_comparison_sections(runs, images, self.classes)


class SegmentationEvaluator(LabelMapEvaluator):
    """Computes the metrics of `LabelMapEvaluator` and, if requested, records the label maps."""

    def __init__(self, classes: int, *, records: bool = False) -> None:
        super().__init__(classes, records=records)
        self.rows: dict[int, dict[str, Tensor]] = {}

    def update(self, outputs: Any, targets: Any, places: Tensor) -> None:
        super().update(outputs, list(targets), places)
        if self.keeps_records:
            for logits, counts, place in zip(outputs, self.image_counts[-len(places) :], places.tolist(), strict=True):
                if place >= 0:
                    pixels = torch.stack([counts.diagonal(), counts.sum(dim=1), counts.sum(dim=0)]).cpu()
                    self.rows[place] = {"prediction": _reduced(logits), "class_pixels": pixels}
                    if self.classes <= MATRIX_CLASSES:
                        self.rows[place]["confusion"] = counts.int().cpu()
            self.image_counts.clear()

    def result(self, collective: Collective) -> Scores:
        scores = super().result(collective)
        if not self.keeps_records:
            return scores
        rows = {place: row for rank in collective.gather_objects(self.rows) for place, row in rank.items()}
        places = sorted(rows)
        records = {
            **scores.records,
            "places": torch.tensor(places),
            "quality": scores.records["image_scores"][:, 0].float(),
        }
        for name in rows[places[0]] if places else ():
            records[name] = pad_together([rows[place][name] for place in places], IGNORED)
        return Scores(scores.metrics, scores.count, records)


def _resized(logits: Tensor, size: Sequence[int]) -> Tensor:
    """Interpolates the logits of an image, [classes, h, w], to another height and width."""
    if tuple(logits.shape[-2:]) == tuple(size):
        return logits
    return F.interpolate(logits[None].float(), size=list(size), mode="bilinear", align_corners=False)[0]


def _reduced(logits: Tensor) -> Tensor:
    """Returns the predicted classes of an image as bytes, with at most 256 pixels in height and width."""
    scale = RECORDED_SIDE / max(logits.shape[-2:])
    if scale < 1:
        logits = _resized(logits, [max(1, round(side * scale)) for side in logits.shape[-2:]])
    return logits.argmax(dim=0).to(torch.uint8).cpu()


def _without_padding(images: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """Sets the padding of normalized images to zero."""
    if all(size == images.shape[-2:] for size in sizes):
        return images
    images = images.clone()
    for image, (height, width) in zip(images, sizes, strict=True):
        image[:, height:] = 0
        image[:, :, width:] = 0
    return images


def _in_layout_of(images: Tensor, batch: Tensor) -> Tensor:
    """Returns a batch in the memory format of the images that it was made from."""
    last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    return batch.contiguous(memory_format=torch.channels_last) if last else batch


def _known(value: float) -> float | None:
    return None if value != value else value


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"
