"""Depthwise convolution that reduces a map, with windows that overlap by one pixel.

Paper: ResT: An Efficient Transformer for Visual Recognition, NeurIPS 2021. The keys and values of EMSA are computed
from the map

    y[i, j] = bias + sum over a, b = 0 .. s of w[a, b] x[i s - p + a, j s - p + b],   p = s // 2

channel by channel, with zero padding: a kernel of s + 1, a stride of s.

    x        [B, C, H, W]
    weight   [C, 1, s + 1, s + 1]
    bias     [C]
    result   [B, C, (H + 2p - s - 1) // s + 1, (W + 2p - s - 1) // s + 1]
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .dispatch import Operation, triton_implementation


def _reference(x: Tensor, weight: Tensor, bias: Tensor, *, stride: int) -> Tensor:
    """Apply a depthwise convolution of kernel s + 1, stride s and padding s // 2.

    See the module docstring for the equation.

    Args:
        x: The map, [B, C, H, W].
        weight: [C, 1, s + 1, s + 1].
        bias: [C].
        stride: s.
    """
    return F.conv2d(x, weight, bias, stride, stride // 2, groups=x.shape[1])


shrink = Operation("shrink", _reference, triton_implementation("shrink"))
