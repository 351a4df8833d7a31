"""The masks of objects as maps of numbers: nothing of a mask may be lost, whatever covers it."""

import pytest
import torch

from interlayer.tasks.overlaid_masks import masks_of, overlay_masks


def squares(*corners, size=8):
    """Returns masks [N, 20, 30] of squares at (row, column)."""
    masks = torch.zeros(len(corners), 20, 30, dtype=torch.bool)
    for mask, (row, column) in zip(masks, corners, strict=True):
        mask[row : row + size, column : column + size] = True
    return masks


@pytest.mark.parametrize(
    ("masks", "count"),
    [
        (squares((0, 0), (0, 8), (9, 3)), 1),
        (squares((0, 0), (4, 4), (8, 8), (0, 20)), 2),  # the first and the third do not overlap
        (squares((2, 3), (2, 3), (2, 3)), 3),  # the same pixels three times
        (torch.zeros(2, 20, 30, dtype=torch.bool), 1),  # objects without a pixel
        (torch.zeros(0, 20, 30, dtype=torch.bool), 1),
        (torch.ones(1, 20, 30, dtype=torch.bool).transpose(1, 2), 1),
    ],
)
def test_masks_come_back_from_as_few_maps_as_their_overlaps_need(masks, count):
    maps = overlay_masks(masks)
    assert maps.shape == (count, *masks.shape[1:])
    again = masks_of(maps, torch.arange(1, 1 + len(masks), dtype=torch.int32))
    assert again.dtype == torch.bool
    assert torch.equal(again, masks)


def test_some_of_the_objects_in_any_order():
    """A crop removes objects, and the numbers of the others stay."""
    masks = squares((0, 0), (4, 4), (8, 8), (0, 20))
    kept = torch.tensor([4, 2], dtype=torch.int32)
    assert torch.equal(masks_of(overlay_masks(masks), kept), masks[[3, 1]])
    assert masks_of(overlay_masks(masks), kept[:0]).shape == (0, 20, 30)


def test_more_objects_than_a_byte_can_number():
    masks = torch.eye(600, dtype=torch.bool).view(600, 20, 30)
    maps = overlay_masks(masks)
    assert len(maps) == 1
    assert torch.equal(masks_of(maps, torch.arange(1, 601, dtype=torch.int32)), masks)
