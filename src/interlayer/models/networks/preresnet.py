"""Pre-activation ResNets for 32-pixel images, which timm does not have.

He et al., "Identity Mappings in Deep Residual Networks", ECCV 2016; as the CIFAR baselines of "Recurrence along Depth"
(RLA, section 4.1, Table 8). Shapes, for an image [B, 3, 32, 32]:

    stem      conv3x3(16), BN, ReLU                     [B, 16, 32, 32]
    stage s   n blocks of width 16, 32, 64 (x 4 in a bottleneck); the first block of stages 2 and 3 has stride 2
    head      BN, ReLU, global average pool, linear

A block adds its branch to its input: x' = shortcut(x) + conv(...(ReLU(BN(x)))). The shortcut is the identity, or a 1x1
convolution of the input without a norm if width or stride changes. Convolutions have no bias.

Deviations: the paper's count for ResNet-164 (1.72M on CIFAR-10) requires a bias in every convolution. There is none
here, as in the original network (1,703,290).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...hosts.finding.components import ComponentBlock, Gate, conv_like, plus, projection
from ...mechanisms import BlockValues
from ..config import cifar_config, register_network
from .classifier import StagedClassifier


class PreActBlock(ComponentBlock):
    """A pre-activation residual block: two 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1 convolutions.

    With `growth`, it is a block of a dual path network (Chen et al., NeurIPS 2017; RLA, Table 11): the first channels
    are those of a ResNet, to which the branch is added. The others are those of a DenseNet, to which the branch appends
    `growth` channels.

    Args:
        in_channels: number of input channels.
        width: number of channels of the 3x3 convolutions.
        bottleneck: whether the block is a bottleneck, with 4 times the width as output channels.
        stride: stride of the (first) 3x3 convolution.
        growth: number of channels that a dual path block appends; a projection starts with twice as many.
    """

    def __init__(self, in_channels: int, width: int, *, bottleneck: bool, stride: int = 1, growth: int = 0) -> None:
        super().__init__()
        self.residual_channels = width * 4 if bottleneck else width
        self.branch_channels = self.residual_channels + growth
        kernels = (1, 3, 1) if bottleneck else (3, 3)
        channels = [in_channels, *[width] * (len(kernels) - 1), self.branch_channels]
        strided = kernels.index(3)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in channels[:-1])
        self.convs = nn.ModuleList(
            nn.Conv2d(channels[i], channels[i + 1], k, stride if i == strided else 1, k // 2, bias=False)
            for i, k in enumerate(kernels)
        )
        self.inner_channels = channels[1:-1]
        if growth:
            self.unsupported_reason = "the output of a dual path block is no sum of a branch and a shortcut"
        self.shortcut: nn.Module = nn.Identity()
        self.out_channels = in_channels + growth
        continues_dense_path = growth and in_channels > self.residual_channels and stride == 1
        if stride != 1 or (in_channels != self.residual_channels and not continues_dense_path):
            projected = self.residual_channels + 2 * growth
            self.shortcut = nn.Conv2d(in_channels, projected, 1, stride, bias=False)
            self.out_channels = projected + growth

    def make_exchange(self, state_channels: int) -> nn.Module:
        first: Any = self.convs[0]
        return nn.Sequential(nn.BatchNorm2d(state_channels), nn.ReLU(), conv_like(first, state_channels))

    def run_components(
        self, x: Tensor, *, addition: Tensor | None = None, gate: Gate | None = None, weight: Tensor | None = None
    ) -> BlockValues:
        y, inner = x, []
        for index, (norm, conv) in enumerate(zip(self.norms, self.convs, strict=True)):
            y = conv(norm(y).relu())
            if index == 0:
                y = plus(y, addition)
            inner.append(y)
        if gate is not None:
            y = gate(y, inner[:-1])
        shortcut = self.shortcut(x)
        if self.branch_channels == self.residual_channels:
            output = shortcut + y
        else:
            both, dense = self.residual_channels, shortcut[:, self.residual_channels :]
            output = torch.cat((shortcut[:, :both] + y[:, :both], dense, y[:, both:]), 1)
        return BlockValues(x, output, shortcut, projection(y, weight))


class PreActResNet(StagedClassifier):
    """A pre-activation ResNet of three stages for small images.

    Args:
        blocks: number of blocks of each stage.
        bottleneck: whether the blocks are bottlenecks.
        widths: number of channels of the 3x3 convolutions of each stage.
        stem_width: number of channels of the stem.
        growth: number of channels that each block appends to the dense path of a dual path network; 0 for a ResNet.
        num_classes: number of classes; 0 for no classifier.
        in_chans: number of channels of the image.
        global_pool: type of pooling, as in timm; "" for none.
        drop_rate: dropout rate before the classifier.
    """

    def __init__(
        self,
        blocks: int,
        *,
        bottleneck: bool = False,
        widths: tuple[int, ...] = (16, 32, 64),
        stem_width: int = 16,
        growth: int = 0,
        num_classes: int = 10,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_chans, stem_width, 3, padding=1, bias=False), nn.BatchNorm2d(stem_width), nn.ReLU()
        )
        channels = stem_width
        stages, self.feature_info = [], []
        for index, width in enumerate(widths):
            stage = []
            for position in range(blocks):
                stride = 2 if index > 0 and position == 0 else 1
                stage.append(PreActBlock(channels, width, bottleneck=bottleneck, stride=stride, growth=growth))
                channels = stage[-1].out_channels
            stages.append(nn.Sequential(*stage))
            self.feature_info.append({"num_chs": channels, "reduction": 2**index, "module": f"stages.{index}"})
        self.stages = nn.Sequential(*stages)
        self._finish(channels, num_classes, global_pool, drop_rate, nn.BatchNorm2d(channels))


# Depth = 6 n + 2 for blocks of two convolutions, 9 n + 2 for bottlenecks.
DEPTHS: dict[str, dict[str, Any]] = {
    "preresnet20_cifar": {"blocks": 3},
    "preresnet56_cifar": {"blocks": 9},
    "preresnet110_cifar": {"blocks": 18},
    "preresnet164_cifar": {"blocks": 18, "bottleneck": True},
    "preresnet164_cifar_wide12": {"blocks": 18, "bottleneck": True, "widths": (19, 35, 67)},  # Table 12
    "preresnet164_cifar_dpn": {"blocks": 18, "bottleneck": True, "growth": 12},
}
default_cfgs = {name: cifar_config(first_conv="stem.0") for name in DEPTHS}
for _name, _options in DEPTHS.items():
    register_network(_name, PreActResNet, _options, stages=3)
