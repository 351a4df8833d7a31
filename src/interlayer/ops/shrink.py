"""A map shrunk by a depthwise convolution whose windows hardly overlap.

Paper: ResT: An Efficient Transformer for Visual Recognition, NeurIPS 2021: keys and values of EMSA come from the map

    y[i, j] = bias + sum over a, b = 0 .. s of w[a, b] x[i s - p + a, j s - p + b],   p = s // 2

channel by channel, zero beyond the map: kernel s + 1, stride s.

    x        [B, C, H, W]
    weight   [C, 1, s + 1, s + 1]
    result   [B, C, (H + 2p - s - 1) // s + 1, (W + 2p - s - 1) // s + 1]
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .dispatch import Operation


@Operation
def shrink(x: Tensor, weight: Tensor, bias: Tensor, *, stride: int) -> Tensor:
    """A depthwise convolution of kernel s + 1, stride s and padding s // 2."""
    return F.conv2d(x, weight, bias, stride, stride // 2, groups=x.shape[1])
