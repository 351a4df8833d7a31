"""The rows of `interlayer tables detection`."""

import pytest

from interlayer.papers import detection


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
