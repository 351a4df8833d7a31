"""Group-CAM (Zhang, Rao and Yang, 2021: "Group-CAM: Group Score-Weighted Visual Explanations for Deep Convolutional
Networks"), which ResT's Figure 2 is drawn with.

A [C, h, w] is the map of the target layer, y the score of the class and X the image [3, H, W]:

    w_c  = mean over positions of dy / dA_c                                   weight of a channel
    M_g  = ReLU(sum of w_c A_c over the channels c of group g),  g = 1 ... G   mask of a group
    M_g  = M_g where it exceeds its 70th percentile, else 0                    de-noised
    M'_g = M_g, interpolated to [H, W] and scaled to 0 ... 1
    X_g  = X M'_g + blur(X) (1 - M'_g)                                        only the region of the group is sharp
    a_g  = p(X_g) - p(blur(X))                                                gain of the probability of the class
    map  = ReLU(sum over g of a_g M'_g)

Where the paper leaves a choice, this is the authors' program: groups are successive channels, the interpolation is
bilinear, and a mask that is the same everywhere is left out. Its blur has a kernel of 51 x 51 pixels with a standard
deviation of 50 for images of 224 x 224. Here the kernel has the same part of the shorter side for every size, and the
pixels of the border are repeated beyond it. If C is not a multiple of G, the first groups have one channel more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .perturbations import gaussian_smooth

GROUPS = 32
PERCENTILE = 0.7  # part of a mask that is removed as noise
KERNEL = 51 / 224  # side of the blur's kernel, as a part of the image's shorter side
DEVIATION = 50 / 51  # standard deviation of the blur, as a part of the kernel's side


def group_cam(
    activations: Tensor,
    gradients: Tensor,
    image: Tensor,
    probability: Callable[[Tensor], Tensor],
    *,
    groups: int = GROUPS,
    batch_size: int = 16,
    advance: Callable[[int], None] = lambda images: None,
) -> Tensor:
    """Returns the class activation map of one image, [H, W], before it is scaled. See the module docstring.

    Args:
        activations: the map of the target layer, [C, h, w].
        gradients: the gradient of the class score with respect to it, [C, h, w].
        image: the normalized image, [3, H, W].
        probability: returns the probability of the class for images [N, 3, H, W], [N].
        groups: number of groups G; one for each channel if there are fewer channels.
        batch_size: number of images that run at a time.
        advance: called with the number of images that have just been run.
    """
    masks = group_masks(activations, gradients, image.shape[-2:], groups)
    blurred = blur(image[None])
    base = probability(blurred)
    advance(1)
    total = image.new_zeros(image.shape[-2:], dtype=torch.float32)
    for batch in masks.split(batch_size) if len(masks) else ():
        weights = batch[:, None].to(image.dtype)
        gains = probability(image * weights + blurred * (1 - weights)) - base
        total += torch.einsum("g,ghw->hw", gains.float(), batch)
        advance(len(batch))
    return total.relu()


def group_masks(activations: Tensor, gradients: Tensor, size: tuple[int, ...], groups: int = GROUPS) -> Tensor:
    """Returns the masks of the groups from 0 to 1, [G, H, W], without those that are the same everywhere.

    Args:
        activations: the map of the target layer, [C, h, w].
        gradients: the gradient of the class score with respect to it, [C, h, w].
        size: height and width of the image.
        groups: number of groups.
    """
    weighted = gradients.float().mean((1, 2), keepdim=True) * activations.float()
    parts = weighted.tensor_split(min(groups, len(weighted)))
    masks = torch.stack([part.sum(0) for part in parts]).relu()
    threshold = masks.flatten(1).quantile(PERCENTILE, dim=1)[:, None, None]
    masks = masks.where(masks > threshold, 0)
    return scaled_masks(masks, size)[0]


def scaled_masks(maps: Tensor, size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Interpolates maps to the size of the image and scales each from 0 to 1. Leaves out those without any contrast.

    Args:
        maps: [N, h, w].
        size: height and width of the image.

    Returns:
        The masks, [M, H, W], and which of the N maps they are of, [N].
    """
    large = F.interpolate(maps[None].float(), size=tuple(size), mode="bilinear", align_corners=False)[0]
    lowest, highest = large.amin((1, 2), keepdim=True), large.amax((1, 2), keepdim=True)
    varies = (highest > lowest).flatten()
    masks = (large - lowest)[varies] / (highest - lowest)[varies]
    return masks, varies


def blur(images: Tensor) -> Tensor:
    """Returns images [B, C, H, W] without their details."""
    radius = max(1, round((KERNEL * min(images.shape[-2:]) - 1) / 2))
    return gaussian_smooth(images, DEVIATION * (2 * radius + 1), radius)
