"""The thin Xception of the RLA paper for 32-pixel images, which timm does not have.

Chollet, "Xception: Deep Learning with Depthwise Separable Convolutions", CVPR 2017, narrowed as in Table 9 of
"Recurrence along Depth" (RLA). Shapes, for an image [B, 3, 32, 32]:

    stem      conv3x3(16), BN, ReLU, conv3x3(32), BN, ReLU                [B, 32, 32, 32]
    stage 1   sep 64, sep 64; sep 128, sep 128; sep 256, sep 256          [B, 256, 16, 16]
    stage 2   8 blocks of three sep 256; sep 256, sep 512                 [B, 512, 8, 8]
    stage 3   sep 512, sep 512, without a shortcut                        [B, 512, 8, 8]
    head      ReLU, global average pool, linear

"sep" is a 3x3 depthwise and a 1x1 convolution followed by BN, preceded by a ReLU unless its input is activated already.
The shortcut is a 1x1 convolution with BN if the width changes. The last blocks of stages 1 and 2 end with a 3x3 average
pooling of stride 2, in place of Xception's max pooling (appendix B.1), and their shortcuts have stride 2. Convolutions
have no bias.

Deviations: Table 9 omits the block of 256 channels in stage 1, without which no interpretation gives the printed
parameters (2.70M). With it there are 2,701,882. The text does not state the size of the average pooling; it is that of
the max pooling it replaces, and pixels beyond the edge are not counted.
"""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from ...hosts.finding.components import ComponentBlock, Gate, conv_like, plus, projection
from ...mechanisms import BlockValues
from ...mechanisms.description import record_flag
from ...mechanisms.options import expect_choice
from ..config import cifar_config, register_network
from .classifier import StagedClassifier

Pooling = Literal["avg", "max"]


class SeparableConv(nn.Module):
    """A 3x3 depthwise convolution, a 1x1 convolution and a norm, preceded by a ReLU if `activate`."""

    def __init__(self, in_channels: int, out_channels: int, *, activate: bool = True) -> None:
        super().__init__()
        self.activate = activate
        self.depthwise = nn.Conv2d(in_channels, in_channels, 3, padding=1, groups=in_channels, bias=False)
        self.pointwise = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor, addition: Tensor | None = None) -> Tensor:
        x = self.pointwise(self.depthwise(x.relu() if self.activate else x))
        return self.norm(plus(x, addition))


class XceptionBlock(ComponentBlock):
    """A residual block of consecutive separable convolutions.

    Args:
        in_channels: number of input channels.
        widths: number of output channels of each separable convolution.
        activate_first: whether the first separable convolution begins with a ReLU.
        pool: the pooling of stride 2 at the end of the branch, "avg" or "max". None for none.
        shortcut: whether the block has a shortcut.
    """

    average_pooling: Tensor | None

    def __init__(
        self,
        in_channels: int,
        widths: tuple[int, ...],
        *,
        activate_first: bool = True,
        pool: Pooling | None = None,
        shortcut: bool = True,
    ) -> None:
        super().__init__()
        channels = (in_channels, *widths)
        self.branch_channels = widths[-1]
        self.inner_channels = list(widths[:-1])
        self.pools_last = pool is not None
        if pool is not None:  # weights of earlier versions were trained with max pooling
            record_flag(self, "average_pooling", pool == "avg", known_by="separable.0.depthwise.weight")
        self.has_skip = shortcut
        self.separable = nn.ModuleList(
            SeparableConv(channels[i], width, activate=activate_first or i > 0) for i, width in enumerate(widths)
        )
        self.shortcut: nn.Module = nn.Identity()
        if shortcut and (pool or in_channels != widths[-1]):
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, widths[-1], 1, 2 if pool else 1, bias=False), nn.BatchNorm2d(widths[-1])
            )

    def make_exchange(self, state_channels: int) -> nn.Module:
        first: Any = self.separable[0]
        activation = [nn.ReLU()] if first.activate else []
        return nn.Sequential(
            *activation,
            conv_like(first.depthwise, state_channels, depthwise=True),
            conv_like(first.pointwise, state_channels),
        )

    def run_components(
        self, x: Tensor, *, addition: Tensor | None = None, gate: Gate | None = None, weight: Tensor | None = None
    ) -> BlockValues:
        y, inner = x, []
        for index, separable in enumerate(self.separable):
            y = separable(y, addition if index == 0 else None)
            inner.append(y)
        if gate is not None:
            y = gate(y, inner[:-1])
        joined = self._pooled(y) if self.pools_last else y
        shortcut = self.shortcut(x) if self.has_skip else None
        return BlockValues(x, plus(joined, shortcut), shortcut, projection(y, weight))

    def _pooled(self, y: Tensor) -> Tensor:
        if self.average_pooling is None:
            return F.max_pool2d(y, 3, 2, padding=1)
        return F.avg_pool2d(y, 3, 2, padding=1, count_include_pad=False)


class XceptionThin(StagedClassifier):
    """The thin Xception for small images.

    Args:
        num_classes: number of classes; 0 for no classifier.
        in_chans: number of channels of the image.
        global_pool: type of pooling, as in timm; "" for none.
        drop_rate: dropout rate before the classifier.
        pooling: the pooling between stages: "avg" as in the paper, or "max" as in the original Xception.
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        pooling: Pooling = "avg",
    ) -> None:
        super().__init__()
        expect_choice("pooling", pooling, ("avg", "max"))
        self.stem = nn.Sequential(
            nn.Conv2d(in_chans, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.stages = nn.Sequential(
            nn.Sequential(
                XceptionBlock(32, (64, 64), activate_first=False),
                XceptionBlock(64, (128, 128)),
                XceptionBlock(128, (256, 256), pool=pooling),
            ),
            nn.Sequential(
                *(XceptionBlock(256, (256, 256, 256)) for _ in range(8)),
                XceptionBlock(256, (256, 512), pool=pooling),
            ),
            nn.Sequential(XceptionBlock(512, (512, 512), activate_first=False, shortcut=False)),
        )
        self.feature_info = [
            {"num_chs": channels, "reduction": reduction, "module": f"stages.{index}"}
            for index, (channels, reduction) in enumerate(((256, 2), (512, 4), (512, 4)))
        ]
        self._finish(512, num_classes, global_pool, drop_rate)


default_cfgs = {"xception_cifar": cifar_config(first_conv="stem.0")}
register_network("xception_cifar", XceptionThin, {}, stages=3)
