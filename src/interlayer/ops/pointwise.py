"""1x1 convolution.

y[b, :, i, j] = W x[b, :, i, j]

x        [B, C, H, W]
weight   [k, C, 1, 1]
result   [B, k, H, W]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pointwise(x: Tensor, weight: Tensor) -> Tensor:
    """Applies a 1x1 convolution without a bias.

    Inside ``torch.compile``, a channels_last map is multiplied by the weight as a matrix over its pixels: the compiler
    fuses the following operations into a matrix product, but calls cuDNN for a convolution, which is slow for the few
    channels of a state.

    Args:
        x: The input, [B, C, H, W].
        weight: The weight, [k, C, 1, 1].
    """
    if not (torch.compiler.is_compiling() and x.is_contiguous(memory_format=torch.channels_last)):
        return F.conv2d(x, weight)
    product = pixels(x) @ weight.flatten(1).t()
    return product.view(x.shape[0], *x.shape[2:], -1).permute(0, 3, 1, 2)


def pixels(x: Tensor) -> Tensor:
    """Reshapes [B, C, H, W] to [B H W, C], one row for each pixel. Returns a view of a channels_last map."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
