"""Boxes of a detector in float32 under autocast.

torchvision gives anchors the dtype of the feature maps and boxes that of the offsets that a head predicts. Under
autocast both are bfloat16, in which the next number after 512 is 516: anchors and proposals would be off by pixels, and
the masks of the objects beyond the 256th, whose numbers stand beside their boxes, would be those of others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchvision.models.detection.anchor_utils import AnchorGenerator

from ...ops.autocast import autocast_type


def keep_boxes_precise(detector: nn.Module) -> None:
    """Makes one of torchvision's detectors compute anchors, boxes and scores in float32 at least under autocast."""
    heads = ("rpn.head", "roi_heads.box_predictor", "roi_heads.mask_predictor", "head")
    for name, module in detector.named_modules():
        if isinstance(module, AnchorGenerator):
            module.register_forward_pre_hook(_without_low_precision)
        elif name in heads:
            module.register_forward_hook(_at_least_float32)


def _without_low_precision(generator: nn.Module, args: tuple[Any, list[Tensor]]) -> tuple[Any, list[Tensor]]:
    """Returns images and feature maps, of which anchors only read the sizes, the device and the dtype."""
    images, maps = args
    if autocast_type(maps[0]) is None:
        return args
    dtype = torch.promote_types(maps[0].dtype, torch.float32)
    return images, [torch.empty((), dtype=dtype, device=x.device).expand(x.shape) for x in maps]


def _at_least_float32(head: nn.Module, args: Any, output: Any) -> Any:
    def promoted(x: Any) -> Any:
        if not isinstance(x, Tensor) or autocast_type(x) is None:
            return x
        return x.to(torch.promote_types(x.dtype, torch.float32))

    return tree_map(promoted, output)
