"""The rows of `interlayer tables detection`."""

import pytest

from interlayer.models.registry import check_name
from interlayer.papers import detection
from interlayer.papers.reported import reported_rows


def test_rows_agree_and_count_the_heads(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(detection, "BACKBONES", ("resnet50",))
    monkeypatch.setattr(detection, "PRINTED", {name: row[:1] for name, row in detection.PRINTED.items()})
    monkeypatch.setattr(detection, "UPERNET", {"deit_tiny_cb": 34.1})
    rows = {row.name: row for row in detection.detection_rows()}
    assert list(rows) == ["retinanet", "faster_rcnn", "mask_rcnn", "upernet"]
    assert all(row.agrees for row in rows.values())
    # four convolutions, a transposed one and the logits, on 100 proposals
    mask_head = 100 * (4 * 14 * 14 * 256 * 256 * 9 + 14 * 14 * 256 * 256 * 4 + 28 * 28 * 256 * 81) / 1e9
    background_boxes = 1000 * 1024 * 4 / 1e9  # the heads of this Mask R-CNN have 81 outputs
    extra = rows["mask_rcnn"].flops - rows["faster_rcnn"].flops
    assert extra == pytest.approx(mask_head + background_boxes, rel=1e-6)


def test_reported_figures_are_those_of_all_papers_for_models_that_exist():
    rows = list(reported_rows())
    assert {row.paper for row in rows} == {"rla", "mrla", "halonet", "cb", "rest"}
    assert len({(row.paper, row.network, row.label, row.backbone) for row in rows}) == len(rows)
    for row in rows:
        figures = [value for value in (*row.boxes, *row.masks, *row.mean_iou) if value is not None]
        assert figures
        assert all(30 < value < 65 for value in figures)
        if row.backbone:
            check_name(row.backbone)
    light = {row.network: row for row in rows if row.backbone == "resnet50_mrla_light"}
    assert (light["faster_rcnn"].boxes, light["mask_rcnn"].masks) == ((40.4, 61.5, 44.0), (37.1, 59.1, 39.6))


def test_the_gains_that_the_papers_state():
    rows = {(row.network, row.backbone): row for row in reported_rows()}

    def gain(network, plain, other, figure):
        return round(getattr(rows[network, other], figure)[0] - getattr(rows[network, plain], figure)[0], 1)

    assert gain("faster_rcnn", "resnet50", "resnet50_rla", "boxes") == 2.4
    assert gain("retinanet", "resnet101", "resnet101_rla", "boxes") == 2.6
    assert gain("mask_rcnn", "resnet101", "resnet101_rla", "masks") == 1.4
    assert gain("faster_rcnn", "resnet50", "resnet50_mrla_light", "boxes") == 4.0
    assert gain("upernet", "deit_tiny_patch16_224", "deit_tiny_cb", "mean_iou") == 1.0
