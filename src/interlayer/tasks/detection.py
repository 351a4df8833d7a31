"""Object detection and instance segmentation, with torchvision's detectors.

An evaluation with records writes, for each image and its K best detections (K = 100, or the most that any image has):

    ==========  =====================  ==================================================================
    boxes       [N, K, 4] float32      left, top, right, bottom in pixels of the original image
    labels      [N, K] int16           class indices from 0; -1 where there are fewer detections
    scores      [N, K] float16
    quality     [N] float32            F1 of the detections with a score of at least 0.5, matched at an IoU of 0.5
    places      [N] int64              the index of each image in its source
    masks       [N, K, 98] uint8       instances only: the mask inside its box, 28 x 28 pixels, packed by
                                       `numpy.packbits`; `unpack_masks` reverses it
    ==========  =====================  ==================================================================

Masks are recorded at the resolution at which Mask R-CNN predicts them, so that pictures can be drawn without the
weights and the file stays small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator

from ..models.dense import detector
from ..models.dense.padded import NormalizedImages
from .average_precision import MAX_DETECTIONS, average_precision_metrics
from .coco_results import coco_detections, describe_detections, detection_table, detections_of
from .dense import DenseTask, plain
from .detection_records import DetectionEvaluator
from .detection_sections import detection_comparison_sections, detection_run_sections
from .drawing import draw_detections
from .evaluator import Evaluator
from .metric import Metric
from .overlaid_masks import masks_of
from .padded import PaddedTargets, sizes_of
from .show import MIN_SCORE, FinishedRun, ImageSource, Section, Table
from .task import TaskError

LOSSES = {  # the names of torchvision's losses in logs
    "loss_classifier": "class_loss", "loss_box_reg": "box_loss", "loss_objectness": "objectness_loss",
    "loss_rpn_box_reg": "proposal_loss", "loss_mask": "mask_loss", "classification": "class_loss",
    "bbox_regression": "box_loss",
}  # fmt: skip
LOSSES_OF = {
    "faster_rcnn": ("class_loss", "box_loss", "objectness_loss", "proposal_loss"),
    "mask_rcnn": ("class_loss", "box_loss", "mask_loss", "objectness_loss", "proposal_loss"),
    "retinanet": ("class_loss", "box_loss"),
}
DETECTIONS = {"faster_rcnn": "box_detections_per_img", "mask_rcnn": "box_detections_per_img"}
ENTRIES = ("boxes", "labels", "area", "iscrowd")
MASKS = ("masks", "maps", "numbers")  # the masks in evaluation, and what training has instead: see overlaid_masks.py


class Detection(DenseTask):
    """Trains Faster R-CNN or RetinaNet and measures COCO's average precision of boxes."""

    name = "detect"
    headline = average_precision_metrics("box")[0]
    eval_metrics = average_precision_metrics("box")
    annotations: ClassVar[Literal["labels", "boxes", "masks", "label_maps"]] = "boxes"
    evaluates_loss = False
    draws = True
    detectors: tuple[str, ...] = ("faster_rcnn", "retinanet")

    def __init__(self, values: Mapping[str, Any], classes: Sequence[str]) -> None:
        super().__init__(values, classes)
        self.detector: str = values["detector"] or self.detectors[0]
        self.train_metrics = tuple(  # type: ignore[misc]
            Metric(name, higher_is_better=False) for name in LOSSES_OF[self.detector]
        )

    @classmethod
    def recipe_name(cls) -> str:
        return "finetune_detection"

    @classmethod
    def unsupported_reason(cls, values: Mapping[str, Any]) -> str:
        if values["detector"] not in (None, *cls.detectors):
            return f"task={cls.name} takes detector={' or '.join(cls.detectors)}, not {values['detector']}"
        return super().unsupported_reason(values)

    # The network

    @property
    def head_name(self) -> str:
        return self.detector

    def build(self) -> nn.Module:
        """Builds the detector. It takes normalized images; its labels start at 1 if it has a background class."""
        shorter, longer = self.evaluated_sides
        values = {**self.values, "head_options": dict(self.values["head_options"])}
        sizes = values["head_options"].pop("anchor_sizes", None)
        given = {} if sizes is None else self._anchors(sizes)
        task = type(self)(values, self.classes)
        model: Any = task.build_dense(detector, self.detector, "detector_options", detector_options=given)
        divisible = model.transform.size_divisible
        model.transform = NormalizedImages(shorter, longer, size_divisible=divisible)
        return model

    def _anchors(self, sizes: Any) -> dict[str, Any]:
        """Returns the option of torchvision's detector with anchors of these sizes, one for each of five levels."""
        valid = (
            isinstance(sizes, list) and len(sizes) == 5 and all(isinstance(s, (int, float)) and s > 0 for s in sizes)
        )
        if not valid:
            raise TaskError(f"head_options.anchor_sizes must be five positive numbers of pixels, got {sizes}")
        ratios = ((0.5, 1.0, 2.0),) * 5
        if self.detector == "retinanet":
            octaves = tuple(tuple(int(size * 2 ** (octave / 3)) for octave in range(3)) for size in sizes)
            return {"anchor_generator": AnchorGenerator(octaves, ratios)}
        return {"rpn_anchor_generator": AnchorGenerator(tuple((int(size),) for size in sizes), ratios)}

    def backbone(self, network: nn.Module) -> nn.Module:
        return network.backbone.body  # type: ignore[union-attr, return-value]

    # A batch

    def target_of(self, target: Any, image: Tensor) -> dict[str, Tensor]:
        if not isinstance(target, dict):
            return {}
        keys = (*ENTRIES, *MASKS) if self.annotations == "masks" else ENTRIES
        return {key: plain(target[key]) for key in keys if key in target}

    def example_targets(self, images: Tensor) -> PaddedTargets:
        """Returns one object in the center of each image."""
        height, width = images.shape[-2:]
        box = torch.tensor([[width / 4, height / 4, width * 3 / 4, height * 3 / 4]])
        target = {"boxes": box, "labels": torch.zeros(1, dtype=torch.int64)}
        if self.annotations == "masks":
            target["maps"] = torch.ones(1, height, width, dtype=torch.int32)
            target["numbers"] = torch.ones(1, dtype=torch.int32)
        return PaddedTargets([(height, width)] * len(images), [target] * len(images)).to(images.device)

    @property
    def first_label(self) -> int:
        """The label of the first class in torchvision's detector."""
        return 0 if self.detector == "retinanet" else 1

    # Training and evaluation

    def forward(self, model: Any, images: Tensor, targets: Any = None) -> Any:
        """Returns torchvision's losses in training; in evaluation the detections of each image, with labels from 0."""
        views = [image[:, :h, :w] for image, (h, w) in zip(images, sizes_of(images, targets), strict=True)]
        if model.training:
            return model(views, [self._objects(target) for target in targets])
        found = model(views)
        return [{**entry, "labels": entry["labels"] - self.first_label} for entry in found]

    def _objects(self, target: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the target of an image as torchvision's detectors take it in training."""
        objects = {"boxes": target["boxes"], "labels": target["labels"] + self.first_label}
        if self.annotations == "masks":
            objects["masks"] = masks_of(target["maps"], target["numbers"])
        return objects

    def loss(self, outputs: Mapping[str, Tensor], targets: Any) -> tuple[Tensor, dict[str, Tensor]]:
        losses = {LOSSES[name]: value.float() for name, value in outputs.items()}
        total = torch.stack(list(losses.values())).sum()
        return total, {name: value.detach() * len(targets) for name, value in losses.items()}

    @property
    def max_detections(self) -> int:
        """The number of detections of an image that count: COCO's 100, or more if the detector returns more."""
        options = self.values["head_options"]
        return max(MAX_DETECTIONS, int(options.get(DETECTIONS.get(self.detector, "detections_per_img"), 0)))

    why_not_attacked = "its predictions are boxes, which have no loss"

    def evaluator(self, *, records: bool = False) -> Evaluator:
        masks = self.annotations == "masks"
        return DetectionEvaluator(masks=masks, max_detections=self.max_detections, records=records)

    # Reports

    def predictions(
        self, outputs: Sequence[Mapping[str, Tensor]], top: int, targets: Any = None
    ) -> list[dict[str, Any]]:
        """Returns all detections of each image: class, score, box and, of instances, mask."""
        return [describe_detections(found, self.classes) for found in outputs]

    def show_details(self, evaluation: Mapping[str, Any]) -> list[Table]:
        """Returns a row for each kind of average precision: of masks and of boxes."""
        kinds = ("mask", "box") if self.annotations == "masks" else ("box",)
        metrics = {kind: average_precision_metrics(kind) for kind in kinds}
        columns = [metric.title.removeprefix(f"{kinds[0]} ") for metric in metrics[kinds[0]]]
        rows = [
            [f"{kind}es" if kind == "box" else f"{kind}s", *(m.format(evaluation[m.name]) for m in metrics[kind])]
            for kind in kinds
        ]
        title = f"{evaluation['model']} on {evaluation['data']}, {evaluation['images']:,} images"
        counted = self.max_detections
        note = "" if counted == MAX_DETECTIONS else f"{counted} detections of an image count, where COCO counts 100."
        return [Table(title, ["", *columns], rows, note)]

    def show_predictions(self, found: Sequence[Mapping[str, Any]]) -> Table:
        return detection_table(found, self.classes)

    def draw(self, image: Image.Image, prediction: Mapping[str, Any], *, min_score: float = MIN_SCORE) -> Image.Image:
        return draw_detections(image, detections_of(prediction, self.classes), self.classes, min_score=min_score)

    def coco_results(
        self, prediction: Mapping[str, Any], image_id: int, categories: Mapping[str, int]
    ) -> list[dict[str, Any]]:
        return coco_detections(prediction, image_id, categories)

    def show_run(self, run: FinishedRun, images: ImageSource | None) -> list[Section]:
        """Shows predictions beside the truth, the worst images, and precision over recall."""
        return detection_run_sections(run, images, self.classes)

    def show_comparison(self, runs: Sequence[FinishedRun], images: ImageSource | None) -> list[Section]:
        """Shows the images on which the first two networks differ most, and precision over recall."""
        return detection_comparison_sections(runs, images, self.classes)


class InstanceSegmentation(Detection):
    """Trains Mask R-CNN and measures COCO's average precision of masks and boxes."""

    name = "instances"
    headline = average_precision_metrics("mask")[0]
    eval_metrics = (*average_precision_metrics("mask"), *average_precision_metrics("box"))
    annotations = "masks"
    detectors = ("mask_rcnn",)
