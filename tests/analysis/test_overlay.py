"""Heatmaps over photographs."""

import numpy as np
import torch
from matplotlib import colormaps
from PIL import Image, ImageColor

from interlayer.analysis.overlay import MARK, mark_box, overlay


def test_the_heatmap_lies_where_its_values_are():
    """Transposed or flipped maps would show another place than the one that the network looks at."""
    picture = torch.zeros(3, 4, 6, dtype=torch.uint8)
    heatmap = torch.zeros(2, 3)
    heatmap[0, 2] = 1  # top right
    shown = np.asarray(overlay(picture, heatmap, opacity=1.0))
    hottest = np.round(255 * np.array(colormaps["turbo"](1.0)[:3]))
    assert (shown == hottest).all(-1).tolist() == [[False] * 4 + [True] * 2] * 2 + [[False] * 6] * 2


def test_opacity_mixes_picture_and_heatmap():
    picture = torch.randint(0, 256, (3, 5, 4), dtype=torch.uint8)
    assert np.array_equal(overlay(picture, torch.rand(5, 4), opacity=0.0), picture.permute(1, 2, 0))
    half, whole = (np.asarray(overlay(picture, torch.zeros(1, 1), opacity=o), dtype=float) for o in (0.5, 1.0))
    np.testing.assert_allclose(half, (whole + picture.permute(1, 2, 0).numpy()) / 2, atol=1)


def test_a_box_is_drawn_around_its_place():
    """Row 1 and column 2 of a grid of 2 x 4."""
    marked = mark_box(Image.new("RGB", (40, 20)), (1 / 2, 2 / 4, 1 / 2, 1 / 4))
    rows, columns = (np.asarray(marked) == np.array(ImageColor.getrgb(MARK))).all(-1).nonzero()
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (10, 19, 20, 29)
    assert mark_box(marked, None) is marked, "the class token has no place"
