"""Predictors without an output for the background, as mmdetection has them.

torchvision's box and mask predictors have one more class, the background, whose boxes and masks no loss reads. Here it
has no weights; a constant is inserted at its place, so torchvision's RoI heads index the outputs as usual.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNPredictor


class BoxPredictor(FastRCNNPredictor):
    """Class scores [N, 1 + num_classes] and box offsets [N, 4 * (1 + num_classes)], zero for the background."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__(in_channels, num_classes + 1)
        self.bbox_pred = nn.Linear(in_channels, 4 * num_classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, offsets = super().forward(x)
        return scores, F.pad(offsets, (4, 0))


class MaskPredictor(MaskRCNNPredictor):
    """Mask logits [N, 1 + num_classes, H, W], zero for the background."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(super().forward(x), (0, 0, 0, 0, 1, 0))
