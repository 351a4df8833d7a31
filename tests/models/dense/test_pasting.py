"""Masks in the pixels of their image: they must be torchvision's, wherever the boxes lie."""

import pytest
import torch
from torchvision.models.detection.roi_heads import paste_masks_in_image

from interlayer.models.dense import pasting
from interlayer.models.dense.pasting import MaskPasting, paste_masks

SIZE = (37, 53)


def objects(count, dtype=torch.float64):
    """Returns masks, and boxes of which some reach over the edges of the image, and some are a fraction of a pixel."""
    width, height = SIZE[1], SIZE[0]
    corners = torch.rand(count, 2, 2, dtype=torch.float64) * torch.tensor([width + 9.0, height + 9.0]) - 4
    corners = corners.clamp(min=0).minimum(torch.tensor([width, height]))  # detectors clip boxes to the image
    boxes = torch.cat([corners.amin(1), corners.amax(1)], 1)
    boxes[::5, :2] = boxes[::5, 2:] - 0.3
    boxes[1::7] = torch.tensor([-4.0, -4.0, 60.0, 41.0])
    return torch.rand(count, 1, 28, 28, dtype=torch.float64).to(dtype), boxes.float()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-5), (torch.bfloat16, 8e-3)])
def test_masks_are_those_of_torchvision(dtype, tolerance):
    masks, boxes = objects(60, dtype)
    found, expected = paste_masks(masks, boxes, SIZE), paste_masks_in_image(masks, boxes, SIZE)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert torch.equal(found == 0, expected == 0), "zero outside of the boxes, and only there"


def test_large_images_are_computed_in_parts(monkeypatch):
    masks, boxes = objects(11)
    whole = paste_masks(masks, boxes, SIZE)
    for elements in (1, 2 * SIZE[0] * SIZE[1]):
        monkeypatch.setattr(pasting, "MOST_ELEMENTS", elements)
        assert torch.equal(paste_masks(masks, boxes, SIZE), whole)


def test_an_image_without_objects():
    masks, boxes = objects(0)
    assert paste_masks(masks, boxes, SIZE).shape == (0, 1, *SIZE)


def test_the_transform_returns_boxes_and_masks_of_the_original_images(monkeypatch):
    """On a GPU; here the CPU is taken for one."""
    transform = MaskPasting(20, 40, [0.0] * 3, [1.0] * 3).eval()
    sizes, resized = [(74, 106), SIZE], [SIZE, SIZE]

    def results():
        torch.manual_seed(0)
        return [dict(zip(("masks", "boxes"), objects(count, torch.float32), strict=True)) for count in (6, 9)]

    expected = transform.postprocess(results(), resized, sizes)
    pasted = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(pasting, "paste_masks", lambda *args: pasted.append(args[2]) or paste_masks(*args))
    found = transform.postprocess(results(), resized, sizes)
    assert pasted == sizes
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours["boxes"], theirs["boxes"])
        torch.testing.assert_close(ours["masks"], theirs["masks"], rtol=0, atol=2e-5)
