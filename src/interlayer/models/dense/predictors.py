"""Predictors without an output for the background, as mmdetection has them, and the mask head before one of them.

torchvision's box and mask predictors have one more class, the background, whose boxes and masks no loss reads. Here it
has no weights; a constant is inserted at its place, so torchvision's RoI heads index the outputs as usual.

The number of masks of a batch is another one in nearly every step, and cuDNN prepares a convolution anew for every
size. On a GPU the mask head and predictor therefore fill up their batch with zeros to a multiple of `GROUP`, but not
where a tracer or a mode, such as a counter of FLOPs, sees the operations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

MASK_CHANNELS = 256  # of the mask head
GROUP = 64  # masks
FILLED_DEVICES = ("cuda",)  # types of devices on which batches are filled up


class BoxPredictor(FastRCNNPredictor):
    """Class scores [N, 1 + num_classes] and box offsets [N, 4 * (1 + num_classes)], zero for the background."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__(in_channels, num_classes + 1)
        self.bbox_pred = nn.Linear(in_channels, 4 * num_classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, offsets = super().forward(x)
        return scores, F.pad(offsets, (4, 0))


class MaskHead(MaskRCNNHeads):
    """The four convolutions of Mask R-CNN's mask head.

    Args:
        channels: channels of the maps of the pyramid.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, (MASK_CHANNELS,) * 4, dilation=1)

    def forward(self, x: Tensor) -> Tensor:
        return _in_groups(super().forward, x)


class MaskPredictor(MaskRCNNPredictor):
    """Mask logits [N, 1 + num_classes, H, W], zero for the background."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(MASK_CHANNELS, MASK_CHANNELS, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(_in_groups(super().forward, x), (0, 0, 0, 0, 1, 0))


def _in_groups(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Runs a function on a batch that is filled up to whole groups, and returns the results of the batch."""
    watched = torch.jit.is_tracing() or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    if watched or x.device.type not in FILLED_DEVICES:
        return run(x)
    missing = -len(x) % GROUP
    return run(F.pad(x, (0, 0, 0, 0, 0, 0, 0, missing)))[: len(x)] if missing else run(x)
