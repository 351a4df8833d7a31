"""Average precision and mean IoU that the papers report for detectors and segmenters.

The figures are those of the papers, on COCO val2017 and ADE20K; this library has not computed them. MRLA's and RLA's
tables contain the same rows for ResNet, SE and ECA, which are listed once, as RLA prints them (of ResNet-50 + ECA in
Mask R-CNN, MRLA prints 58.1 for AP50 of masks, RLA 57.1). Rows of other methods are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ReportedRow:
    """A row of a table of a paper, in percent; None for figures that are not printed.

    Args:
        paper: key of the paper.
        table: number of the table.
        network: name of the detector or segmenter.
        label: label of the row, as printed.
        backbone: name of the backbone in this library or in timm, or "" if there is none.
        boxes: AP, AP50 and AP75 of boxes.
        masks: AP, AP50 and AP75 of masks.
        mean_iou: mean IoU after 40k and after 160k steps.
    """

    paper: str
    table: str
    network: str
    label: str
    backbone: str
    boxes: tuple[float | None, ...] = (None, None, None)
    masks: tuple[float | None, ...] = (None, None, None)
    mean_iou: tuple[float | None, ...] = (None, None)


# Label, what is appended to the name of the ResNet, and AP, AP50 and AP75 of boxes with 50 and with 101 layers.
Boxes = tuple[str, str, tuple[float, ...], tuple[float, ...] | None]
# The same for Mask R-CNN, with those of masks.
Masks = tuple[str, str, tuple[float | None, ...], tuple[float | None, ...] | None]

RLA_BOXES: dict[str, list[Boxes]] = {
    "faster_rcnn": [
        ("ResNet", "", (36.4, 58.2, 39.2), (38.7, 60.6, 41.9)),
        ("+ RLA", "_rla", (38.8, 59.6, 42.0), (41.2, 61.8, 44.9)),
        ("+ SE", "_se", (37.7, 60.1, 40.9), (39.6, 62.0, 43.1)),
        ("+ ECA", "_eca", (38.0, 60.6, 40.9), (40.3, 62.9, 44.0)),
        ("+ ECA + RLA", "_eca_rla", (39.8, 61.2, 43.2), (42.1, 63.3, 46.1)),
    ],
    "retinanet": [
        ("ResNet", "", (35.6, 55.5, 38.2), (37.7, 57.5, 40.4)),
        ("+ RLA", "_rla", (37.9, 57.0, 40.8), (40.3, 59.8, 43.5)),
        ("+ SE", "_se", (37.1, 57.2, 39.9), (38.7, 59.1, 41.6)),
        ("+ ECA", "_eca", (37.3, 57.7, 39.6), (39.1, 59.9, 41.8)),
        ("+ ECA + RLA", "_eca_rla", (38.9, 58.7, 41.7), (41.5, 61.6, 44.4)),
    ],
}
RLA_MASKS: list[Masks] = [
    ("ResNet", "", (37.2, 58.9, 40.3, 34.1, 55.5, 36.2), (39.4, 60.9, 43.3, 35.9, 57.7, 38.4)),
    ("+ RLA", "_rla", (39.5, 60.1, 43.3, 35.6, 56.9, 38.0), (41.8, 62.3, 46.2, 37.3, 59.2, 40.1)),
    ("+ SE", "_se", (38.7, 60.9, 42.1, 35.4, 57.4, 37.8), (40.7, 62.5, 44.3, 36.8, 59.3, 39.2)),
    ("+ ECA", "_eca", (39.0, 61.3, 42.1, 35.6, 57.1, 37.7), (41.3, 63.1, 44.8, 37.4, 59.9, 39.8)),
    ("+ ECA + RLA", "_eca_rla", (40.6, 61.8, 44.0, 36.5, 58.4, 38.8), (42.9, 63.6, 46.9, 38.1, 60.5, 40.8)),
]
MRLA_BOXES: dict[str, list[Boxes]] = {
    "faster_rcnn": [
        ("+ MRLA-base", "_mrla_base", (40.1, 61.3, 43.8), None),
        ("+ MRLA-light", "_mrla_light", (40.4, 61.5, 44.0), (42.0, 63.1, 45.7)),
    ],
    "retinanet": [
        ("+ MRLA-base", "_mrla_base", (39.3, 59.3, 42.1), None),
        ("+ MRLA-light", "_mrla_light", (39.6, 59.7, 42.4), (41.3, 61.4, 44.2)),
    ],
}
MRLA_MASKS: list[Masks] = [
    ("+ MRLA-base", "_mrla_base", (40.9, 62.1, 44.8, 36.9, 58.8, None), None),  # Table 9 has no such row
    ("+ MRLA-light", "_mrla_light", (41.2, 62.3, 45.1, 37.1, 59.1, 39.6), (42.8, 63.6, 46.5, 38.4, 60.6, 41.0)),
]
# The first AP is that of boxes, the second that of masks; AP50 and AP75 are not printed.
HALONET: list[tuple[str, str, float, float]] = [
    ("R50 baseline in lit", "", 42.1, 37.7),
    ("R50 + SE", "", 44.5, 39.6),
    ("R50 + SE + Local Att (b = 8)", "halo_resnet50_b8", 45.2, 40.3),
    ("R50 + SE + Local Att (b = 32)", "halo_resnet50_b32", 45.4, 40.5),
    ("R101 + SE", "", 45.9, 40.6),
    ("R101 + SE + Local Att (b = 8)", "halo_resnet101_b8", 46.8, 41.2),
]
CB_UPERNET: list[tuple[str, str, float, float]] = [
    ("ViT-Ti", "deit_tiny_patch16_224", 35.5, 38.9),
    ("+ CB", "deit_tiny_cb", 36.5, 39.0),
    ("+ CB_S", "deit_tiny_cb_scaled", 36.1, 39.8),
    ("ViT-S", "deit_small_patch16_224", 41.5, 43.3),
    ("+ CB", "deit_small_cb", 41.9, 43.9),
    ("+ CB_S", "deit_small_cb_scaled", 41.6, 43.1),
    ("ViT-B", "deit_base_patch16_224", 44.3, 45.0),
    ("+ CB", "deit_base_cb", 45.1, 45.6),
    ("+ CB_S", "deit_base_cb_scaled", 44.6, 45.3),
]
CB_MASKS: list[tuple[str, str, tuple[float, ...], tuple[float, ...]]] = [
    ("ViT-Ti", "deit_tiny_patch16_224", (34.8, 57.4, 36.5), (32.5, 54.3, 33.7)),
    ("+ CB", "deit_tiny_cb", (35.1, 57.9, 36.8), (32.8, 54.4, 34.2)),
]
REST: list[tuple[str, str, float]] = [
    ("ResT-Small, without LN", "", 39.5),  # this library's detectors have the LayerNorm
    ("ResT-Small, with LN", "rest_small", 40.3),
    ("ResT-Base, without LN", "", 41.2),
    ("ResT-Base, with LN", "rest_base", 42.0),
]


def reported_rows() -> Iterator[ReportedRow]:
    """Yields the rows of all papers."""
    yield from _resnet_rows("rla", "4", "5", RLA_BOXES, RLA_MASKS)
    yield from _resnet_rows("mrla", "2", "3, 9", MRLA_BOXES, MRLA_MASKS)
    for label, backbone, boxes, masks in HALONET:
        yield ReportedRow("halonet", "5", "mask_rcnn", label, backbone, (boxes, None, None), (masks, None, None))
    for label, backbone, short, long in CB_UPERNET:
        yield ReportedRow("cb", "6", "upernet", label, backbone, mean_iou=(short, long))
    for label, backbone, box_figures, mask_figures in CB_MASKS:
        yield ReportedRow("cb", "7", "mask_rcnn", label, backbone, box_figures, mask_figures)
    for label, backbone, boxes in REST:
        yield ReportedRow("rest", "A.2", "retinanet", label, backbone, (boxes, None, None))


def _resnet_rows(
    paper: str, box_table: str, mask_table: str, boxes: dict[str, list[Boxes]], masks: list[Masks]
) -> Iterator[ReportedRow]:
    rows: list[tuple[str, str, Masks]] = [(box_table, name, row) for name, listed in boxes.items() for row in listed]
    rows += [(mask_table, "mask_rcnn", row) for row in masks]
    for table, network, (label, suffix, *columns) in rows:
        for layers, figures in zip((50, 101), columns, strict=True):
            if figures is not None:
                named = f"ResNet-{layers}" if label == "ResNet" else f"ResNet-{layers} {label}"
                of_masks = figures[3:] or (None, None, None)
                yield ReportedRow(paper, table, network, named, f"resnet{layers}{suffix}", figures[:3], of_masks)
