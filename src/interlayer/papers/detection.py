"""Trainable parameters of MRLA's detectors and of CB's UPerNets, and the multiply-adds of detectors at 1280 x 800.

Multiply-adds are those of torch's counter for one image: the backbone, the pyramid and the dense heads, and in
two-stage detectors the box head on 1000 proposals and the mask head on 100. The FLOPs that MRLA prints are larger and
not compared; docs/deviations.md explains the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..analysis.shapes import Memory, RememberedShapes
from ..models.dense import detector, segmenter

IMAGE = (1, 3, 800, 1280)
PROPOSALS, MASKS = 1000, 100
PRINTED = {
    "retinanet": (37.74, 37.92, 56.74, 57.12),
    "faster_rcnn": (41.53, 41.70, 60.52, 60.90),
    "mask_rcnn": (44.18, 44.34, 63.17, 63.54),
}
PRINTED_FLOPS = {  # in billions, at 1280 x 800: MRLA, Tables 3 and 10
    ("mask_rcnn", "resnet50"): 275.58,
    ("mask_rcnn", "resnet50_mrla_light"): 276.93,
    ("mask_rcnn", "resnet101"): 351.65,
    ("mask_rcnn", "resnet101_mrla_light"): 353.84,
    ("retinanet", "resnet101"): 315,
    ("retinanet", "resnet101_mrla_light"): 318,
}
BACKBONES = ("resnet50", "resnet50_mrla_light", "resnet101", "resnet101_mrla_light")
UPERNET = {"deit_tiny_cb": 34.1, "deit_small_cb": 53.5, "deit_base_cb": 127.0}


@dataclass(frozen=True)
class DenseRow:
    """A detector or segmenter: printed and counted parameters in millions, and multiply-adds in billions.

    Args:
        name: name of the detector or segmenter.
        backbone: name of the backbone.
        printed: the parameters that the paper prints.
        parameters: the counted parameters.
        decimals: number of decimals that the paper prints.
        flops: the counted multiply-adds; None for segmenters.
        printed_flops: the multiply-adds that the paper prints, by another counter; None if it prints none.
    """

    name: str
    backbone: str
    printed: float
    parameters: float
    decimals: int
    flops: float | None = None
    printed_flops: float | None = None

    @property
    def agrees(self) -> bool:
        return f"{self.parameters:.{self.decimals}f}" == f"{self.printed:.{self.decimals}f}"


def detection_rows() -> Iterator[DenseRow]:
    """Yields the counted rows, one at a time. UPerNet needs the extra ``segmentation``."""
    building: Memory = {}
    counting: Memory = {}
    for name, figures in PRINTED.items():
        for backbone, printed in zip(BACKBONES, figures, strict=True):
            with torch.device("meta"), RememberedShapes(building):  # counting only needs shapes
                model = detector(
                    name,
                    backbone=backbone,
                    num_classes=80,
                    freeze_stages=1,
                    # the baseline heads of Mask R-CNN also have an output for the background
                    predict_background=name == "mask_rcnn" and backbone in ("resnet50", "resnet101"),
                )
            with torch.device("meta"):
                flops = _flops(model.eval(), counting)
            printed_flops = PRINTED_FLOPS.get((name, backbone))
            yield DenseRow(name, backbone, printed, _trainable(model), 2, flops, printed_flops)
    for backbone, printed in UPERNET.items():
        with torch.device("meta"), RememberedShapes(building):
            model = segmenter("upernet", backbone=backbone, num_classes=150)
        yield DenseRow("upernet", backbone, printed, _trainable(model), 1)


def _trainable(model: torch.nn.Module) -> float:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) / 1e6


@torch.no_grad()
def _flops(model: Any, memory: Memory) -> float:
    with FlopCounterMode(display=False) as counter, RememberedShapes(memory, counter.get_total_flops) as shapes:
        levels = list(model.backbone(torch.zeros(IMAGE)).values())
        if hasattr(model, "rpn"):
            model.rpn.head(levels)
            model.roi_heads.box_predictor(model.roi_heads.box_head(torch.zeros(PROPOSALS, 256, 7, 7)))
            if model.roi_heads.has_mask():
                model.roi_heads.mask_predictor(model.roi_heads.mask_head(torch.zeros(MASKS, 256, 14, 14)))
        else:
            model.head(levels)
    return (counter.get_total_flops() + shapes.repeated) / 2 / 1e9
