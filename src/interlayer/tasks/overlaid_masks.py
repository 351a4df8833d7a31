"""The masks of an image's objects as a few maps of numbers, because the masks of hundreds of objects are mostly zeros.

A microscope image of 600 x 800 pixels with 400 cells has 190 MB of masks. Objects rarely overlap, so that one map
[H, W], in which each pixel has the number of its object, holds nearly all of them; objects that overlap others are in
further maps. Nearest resizing, crops and flips of such a map give those of every mask in it, so the maps are what is
augmented and sent to the device, which computes the masks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def overlay_masks(masks: Tensor) -> Tensor:
    """Returns maps [M, H, W] int32 of the masks [N, H, W] of an image.

    The pixels of mask i are i + 1 in the first map in which no earlier object has one of them, and the others are 0.
    There is at least one map.
    """
    count, height, width = masks.shape
    maps = [np.zeros(height * width, dtype=np.int32)]
    for number, mask in enumerate(masks.numpy().reshape(count, height * width), start=1):
        pixels = np.flatnonzero(mask)
        free = next((entry for entry in maps if not entry[pixels].any()), None)
        if free is None:
            free = np.zeros_like(maps[0])
            maps.append(free)
        free[pixels] = number
    return torch.from_numpy(np.stack(maps)).view(len(maps), height, width)


def masks_of(maps: Tensor, numbers: Tensor) -> Tensor:
    """Returns the masks [N, H, W] of the objects with the given numbers [N], as booleans."""
    wanted = numbers[:, None, None]
    masks = maps[0] == wanted
    for entry in maps[1:]:
        masks |= entry == wanted
    return masks
