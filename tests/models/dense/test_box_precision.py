"""Boxes under autocast: bfloat16 has no pixels between 512 and 516, and no numbers between 256 and 258."""

import copy

import pytest
import torch
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.roi_heads import RoIHeads

import interlayer

BACKBONE = "resnet18"


def seen_anchors(model, images, precision, targets=None):
    """Returns the anchors of the first image, computed under autocast or without it."""
    found = []
    generator = next(module for module in model.modules() if isinstance(module, AnchorGenerator))
    handle = generator.register_forward_hook(lambda module, args, anchors: found.append(anchors[0]))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        model(images, targets)
    handle.remove()
    return found[0]


@pytest.mark.parametrize("name", ["faster_rcnn", "retinanet"])
def test_anchors_are_those_of_float32(name):
    torch.manual_seed(0)
    model = interlayer.detector(name, backbone=BACKBONE, num_classes=2, resize=False).eval()
    images = [torch.rand(3, 64, 608)]
    with torch.no_grad():
        anchors, expected = (seen_anchors(model, images, precision) for precision in ("bfloat16", "float32"))
    assert anchors.dtype == torch.float32
    assert torch.equal(anchors, expected)
    assert len(anchors[:, 0].unique()) > 64, "one column of anchors beside the other"


def test_proposals_and_detections_lie_between_the_pixels_of_bfloat16(monkeypatch):
    torch.manual_seed(0)
    model = interlayer.detector("mask_rcnn", backbone=BACKBONE, num_classes=2, resize=False)
    proposals, forward = [], RoIHeads.forward

    def spy(self, features, boxes, *others):
        proposals.append(boxes[0])
        return forward(self, features, boxes, *others)

    monkeypatch.setattr(RoIHeads, "forward", spy)
    model.roi_heads.score_thresh = 0.0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        (found,) = model.eval()([torch.rand(3, 64, 608)])
    for boxes in (proposals[0], found["boxes"]):
        assert boxes.dtype == torch.float32
        assert (boxes != boxes.bfloat16().float()).float().mean() > 0.5
    assert found["scores"].dtype == torch.float32


def test_every_one_of_many_objects_gets_its_own_mask():
    """The number of an object stands beside its box, where bfloat16 takes 257 for 256, and 383 for 384."""
    torch.manual_seed(0)
    options = {"box_batch_size_per_image": 2048, "rpn_post_nms_top_n_train": 16}
    model = interlayer.detector(
        "mask_rcnn", backbone=BACKBONE, num_classes=1, resize=False, detector_options=options
    )  # fmt: skip
    corners = torch.cartesian_prod(torch.arange(0, 190, 10), torch.arange(0, 210, 10))[:384].float()
    boxes = torch.cat([corners, corners + 9], 1)
    masks = torch.zeros(len(boxes), 224, 224, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
        mask[top:bottom, left:right] = True
    target = {"boxes": boxes, "labels": torch.ones(len(boxes), dtype=torch.int64), "masks": masks}
    with torch.autocast("cpu", torch.bfloat16):
        losses = model([torch.rand(3, 224, 224)], [target])
    assert all(torch.isfinite(loss) for loss in losses.values())


def test_a_detector_in_float64_stays_there():
    torch.manual_seed(0)
    model = interlayer.detector("faster_rcnn", backbone=BACKBONE, num_classes=2, resize=False).double().eval()
    with torch.no_grad():
        (found,) = copy.deepcopy(model)([torch.rand(3, 64, 64, dtype=torch.float64)])
    assert found["boxes"].dtype == found["scores"].dtype == torch.float64
