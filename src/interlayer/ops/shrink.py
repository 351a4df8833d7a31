"""Depthwise convolution that downsamples a map, with windows that overlap by one pixel.

Paper: ResT: An Efficient Transformer for Visual Recognition, NeurIPS 2021. The keys and values of EMSA are computed
from the map

    y[i, j] = bias + sum over a, b = 0 .. s of w[a, b] x[i s - p + a, j s - p + b],   p = s // 2

for each channel, with zero padding: a kernel of size s + 1 and a stride of s.

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
    """Applies a depthwise convolution of kernel s + 1, stride s and padding s // 2.

    See the module docstring for the equation.

    Args:
        x: The input, [B, C, H, W].
        weight: The weight, [C, 1, s + 1, s + 1].
        bias: The bias, [C].
        stride: The stride s.
    """
    return F.conv2d(x, weight, bias, stride, stride // 2, groups=x.shape[1])


shrink = Operation("shrink", _reference, triton_implementation("shrink"))
