"""A pyramid of feature maps from a plain ViT, whose maps all have the stride of its patches.

The map of stride s is brought to stride t by log2(s / t) transposed convolutions of stride 2, or by max pooling with
stride t / s. Between two transposed convolutions there are a batch norm and a GELU. For patches of 16 pixels and the
strides 4, 8, 16 and 32 these are two transposed convolutions, one, none, and a pool: the pyramid of XCiT, whose
protocol CB follows (section 4.4). ViTDet makes it of the last map, with a LayerNorm in place of the batch norm.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class SimplePyramid(nn.Module):
    """Brings maps [B, C, H, W] of one stride to a stride each.

    Args:
        channels: channels of every map.
        stride: stride of the input maps, a power of two.
        strides: strides of the output maps, powers of two.
    """

    def __init__(self, channels: int, stride: int, strides: Sequence[int]) -> None:
        super().__init__()
        self.levels = nn.ModuleList(_level(channels, stride, target) for target in strides)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        return [level(x) for level, x in zip(self.levels, maps, strict=True)]


def _level(channels: int, stride: int, target: int) -> nn.Module:
    if target > stride:
        return nn.MaxPool2d(target // stride, target // stride)
    layers: list[nn.Module] = []
    while stride > target:
        if layers:
            layers += [nn.BatchNorm2d(channels), nn.GELU()]
        layers.append(nn.ConvTranspose2d(channels, channels, 2, 2))
        stride //= 2
    return nn.Sequential(*layers) if layers else nn.Identity()
