"""Score-CAM (Wang et al., 2020: "Score-CAM: Score-Weighted Visual Explanations for Convolutional Neural Networks"),
which MRLA's Figure 6 is drawn with.

A [C, h, w] is the map of the target layer, X the image [3, H, W] and f(X) the logit of the class:

    H_c = A_c, interpolated to [H, W] and scaled to 0 ... 1
    w   = softmax over c of f(X H_c)
    map = ReLU(sum over c of w_c A_c)

The paper subtracts f of a black image from every f(X H_c), which the softmax cancels. pytorch-grad-cam's version
differs in two ways. It makes all C masked images at once, more than 1 GB for an image of 224 x 224 pixels and 2,048
channels, where they are made batch by batch here; and it interpolates with aligned corners, where here, as in the
authors' program, the cells of a map cover the image evenly.

A channel that is the same everywhere has the mask 0, so that all of these share one pass of a black image.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .group_cam import scaled_masks


def score_cam(
    activations: Tensor,
    image: Tensor,
    score: Callable[[Tensor], Tensor],
    *,
    channels: int | None = None,
    batch_size: int = 16,
    advance: Callable[[int], None] = lambda images: None,
) -> Tensor:
    """Returns the class activation map of one image, [h, w], before it is scaled. See the module docstring.

    Args:
        activations: the map of the target layer, [C, h, w].
        image: the normalized image, [3, H, W].
        score: returns the logit of the class for images [N, 3, H, W], [N].
        channels: the number of channels to use, those whose maps have the largest variance; all if None.
        batch_size: number of images that run at a time.
        advance: called with the number of channels that have just been scored.
    """
    used = activations.float()
    if channels is not None and channels < len(used):
        used = used[used.flatten(1).var(1, correction=0).topk(channels).indices]
    scores = []
    black = None
    for maps in used.split(batch_size):
        masks, varies = scaled_masks(maps, image.shape[-2:])
        found = image.new_empty(len(maps), dtype=torch.float32)
        if len(masks):
            found[varies] = score(image * masks[:, None].to(image.dtype)).float()
        if not varies.all():
            if black is None:
                black = score(torch.zeros_like(image)[None]).float()
            found[~varies] = black
        scores.append(found)
        advance(len(maps))
    weights = torch.cat(scores).softmax(0)
    return torch.einsum("c,chw->hw", weights, used).relu()
