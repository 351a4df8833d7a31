"""COCO's average precision of boxes and masks, by torchmetrics on faster-coco-eval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .evaluator import Collective, Evaluator, Scores
from .metric import Metric
from .task import TaskError

_KINDS = {"box": "bbox", "mask": "segm"}  # torchmetrics' names
_VALUES = {  # torchmetrics' names of COCO's figures
    "ap": "map", "ap50": "map_50", "ap75": "map_75", "ap_small": "map_small", "ap_medium": "map_medium",
    "ap_large": "map_large",
}  # fmt: skip
_TITLES = {
    "ap": "AP", "ap50": "AP50", "ap75": "AP75", "ap_small": "AP small", "ap_medium": "AP medium",
    "ap_large": "AP large",
}  # fmt: skip
Sample = Mapping[str, Any]  # the detections or the target of one image
MAX_DETECTIONS = 100  # COCO counts the 100 detections of an image with the highest scores


def average_precision_metrics(kind: str) -> tuple[Metric, ...]:
    """Returns the metrics of boxes ("box") or masks ("mask"): AP, AP50, AP75, and AP by size."""
    return tuple(Metric(f"{kind}_{name}", label=f"{kind} {title}") for name, title in _TITLES.items())


class AveragePrecisionEvaluator(Evaluator):
    """Computes COCO's average precision, by size as well.

    The outputs are torchvision's detections: for each image boxes [N, 4], labels [N], scores [N] and, with masks, masks
    [N, 1, H, W] as probabilities. Targets have boxes, labels, area, iscrowd and, with masks, masks. Both are in pixels
    of the original image, by which COCO defines small (below 32 x 32), medium and large (above 96 x 96) objects. A
    figure for which there are no objects is NaN. The loss is NaN, because detectors in evaluation compute none.

    Ranks may have different numbers of images.

    Args:
        masks: whether masks are evaluated besides boxes.
        max_detections: number of detections of an image that count. COCO's is 100; images with more objects than that
            need more, and the figures are then no longer COCO's.
        threshold: the probability from which a pixel belongs to a mask.
    """

    def __init__(self, *, masks: bool = False, max_detections: int = MAX_DETECTIONS, threshold: float = 0.5) -> None:
        self.kinds = ("box", "mask") if masks else ("box",)
        self.threshold, self.max_detections = threshold, max_detections
        if max_detections <= 10:
            raise TaskError(f"expected max_detections of more than 10, got {max_detections}")
        self.metric = _mean_average_precision([_KINDS[kind] for kind in self.kinds], max_detections)
        self.metric.warn_on_many_detections = False  # torchvision's detectors return the 100 best as well

    def update(self, outputs: Sequence[Sample], targets: Sequence[Sample], places: Tensor) -> None:
        kept = (places >= 0).tolist()
        found = [self._detection(output) for output, keep in zip(outputs, kept, strict=True) if keep]
        truth = [self._truth(target) for target, keep in zip(targets, kept, strict=True) if keep]
        if found:
            self.metric.update(found, truth)

    def _detection(self, output: Mapping[str, Any]) -> dict[str, Tensor]:
        values = {key: _plain(output[key]) for key in ("boxes", "labels", "scores")}
        values["boxes"], values["scores"] = values["boxes"].float(), values["scores"].float()
        if "mask" in self.kinds:
            masks = output["masks"].squeeze(1) if output["masks"].dim() == 4 else output["masks"]
            # compared on the device, because booleans are a quarter of the bytes to copy
            values["masks"] = _plain(masks if masks.dtype == torch.bool else masks >= self.threshold)
        return values

    def _truth(self, target: Mapping[str, Any]) -> dict[str, Tensor]:
        values = {key: _plain(target[key]) for key in ("boxes", "labels", "area", "iscrowd") if key in target}
        values["boxes"] = values["boxes"].float()
        if "mask" in self.kinds:
            values["masks"] = _plain(target["masks"]).bool()
        return values

    def result(self, collective: Collective) -> Scores:
        # torchmetrics gathers tensor by tensor, which fails if a rank has fewer images than another
        ranks = collective.gather_objects({name: getattr(self.metric, name) for name in self.metric._defaults})
        count = sum(len(rank["groundtruth_labels"]) for rank in ranks)
        names = [f"{kind}_{name}" for kind in self.kinds for name in _VALUES]
        if not count:
            return Scores(dict.fromkeys(["loss", *names], float("nan")), 0)
        merged = _mean_average_precision([_KINDS[kind] for kind in self.kinds], self.max_detections)
        for name in self.metric._defaults:
            setattr(merged, name, [entry for rank in ranks for entry in rank[name]])
        merged._update_count = count  # otherwise it warns that there were no updates
        figures = merged.compute()
        metrics = {"loss": float("nan")}
        for kind in self.kinds:
            prefix = f"{_KINDS[kind]}_" if len(self.kinds) > 1 else ""
            for name, theirs in _VALUES.items():
                value = float(figures[f"{prefix}{theirs}"])
                metrics[f"{kind}_{name}"] = value if value >= 0 else float("nan")  # -1: there are no such objects
        return Scores(metrics, count)


def _plain(tensor: Tensor) -> Tensor:
    """Returns a detached tensor on the CPU without torchvision's subclass."""
    return tensor.detach().as_subclass(Tensor).cpu()


def _mean_average_precision(kinds: Sequence[str], max_detections: int) -> Any:
    """Returns torchmetrics' metric. Raises if the extra is not installed."""
    try:
        import faster_coco_eval  # noqa: F401
    except ImportError as error:
        raise TaskError(
            "average precision is computed by faster-coco-eval: install it with pip install 'interlayer[detection]'"
        ) from error
    from torchmetrics.detection import MeanAveragePrecision

    return MeanAveragePrecision(
        iou_type=tuple(kinds),
        # COCO's thresholds in float64: torchmetrics rounds them to float32, so that a recall of 0.2 misses one of them
        iou_thresholds=np.linspace(0.5, 0.95, 10).tolist(),
        rec_thresholds=np.linspace(0, 1, 101).tolist(),
        max_detection_thresholds=[1, 10, max_detections],
        backend="faster_coco_eval",
        sync_on_compute=False,
    )
