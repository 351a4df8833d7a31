"""DenseNet-BC for 32-pixel images, and its variants with shared 1x1 convolutions (RLA, section 3.2, Eq. 9 and 10).

Huang et al., "Densely Connected Convolutional Networks", CVPR 2017, and "Recurrence along Depth", NeurIPS 2021. A layer
of a stage reads the input x^0 of the stage and the outputs of all earlier layers, with k = 12 channels each:

    DenseNet        x^t = Conv3^t(Conv1^t([x^0, x^1, ..., x^{t-1}]))                                            Eq. 3
    Shared-Lag      x^t = Conv3^t(Conv1_1(x^{t-1}) + ... + Conv1_{t-1}(x^1) + Conv1_0^t(x^0))                   Eq. 9
    Shared-Ordinal  x^t = Conv3^t(Conv1_{t-1}(x^{t-1}) + ... + Conv1_1(x^1) + Conv1_0^t(x^0))                  Eq. 10

Every convolution is preceded by BN and ReLU, and 1x1 convolutions have 4 k = 48 output channels. The layers of a stage
share Conv1_1 to Conv1_15 and their BN. The convolutions of x^0 are not shared.

Shapes, for an image [B, 3, 32, 32]: the stem concatenates the image and 24 convolved channels (27 channels). Stages of
16 layers end with 219, 301 and 342 channels. Stages 2 and 3 begin with a transition: BN, ReLU, a 1x1 convolution to
half the channels, rounded down, and 2x2 average pooling.

Deviations: none. The parameters printed in the paper (0.80M and 0.60M) include the running statistics of BN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...mechanisms.description import record_description
from ..config import cifar_config, register_network
from .classifier import StagedClassifier

Sharing = Literal["lag", "ordinal"]


class Shared1x1(nn.Module):
    """1x1 convolutions and their norm that the layers of a stage share, with one slice for each lag or ordinal.

    Args:
        layers: number of earlier layers that the last layer reads.
        growth: number of channels of each layer.
        out_channels: number of output channels.
        sharing: "lag" if layer t reads layer t - l with slice l, "ordinal" if every layer reads layer l with slice l.
    """

    def __init__(self, layers: int, growth: int, out_channels: int, sharing: Sharing) -> None:
        super().__init__()
        self.growth = growth
        self.sharing = sharing
        self.norm = nn.BatchNorm2d(layers * growth)
        self.conv = nn.Conv2d(layers * growth, out_channels, 1, bias=False)
        record_description(self)

    def forward(self, earlier: Sequence[Tensor]) -> Tensor:
        """Returns the sum of the convolutions of earlier layers, which are given in order."""
        ordered = earlier if self.sharing == "ordinal" else earlier[::-1]
        x, norm = torch.cat(list(ordered), 1), self.norm
        used = slice(x.shape[1])
        assert norm.running_mean is not None
        assert norm.running_var is not None
        x = F.batch_norm(
            x,
            norm.running_mean[used],
            norm.running_var[used],
            norm.weight[used],
            norm.bias[used],
            norm.training,
            0.1 if norm.momentum is None else norm.momentum,
            norm.eps,
        )
        return F.conv2d(x.relu(), self.conv.weight[:, used])

    def describe(self) -> dict[str, str]:
        """Returns the options that cannot be inferred from the tensors."""
        return {"mechanism": "Shared1x1", "sharing": self.sharing, "growth": str(self.growth)}


class DenseLayer(nn.Module):
    """BN, ReLU, 1x1 convolution to 4 k channels, BN, ReLU, 3x3 convolution to k channels.

    If the 1x1 convolutions of earlier layers are shared, the input is x^0, and their sum is added before the second BN.
    """

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor, shared: Tensor | None = None) -> Tensor:
        inner = self.conv1(self.norm1(x).relu())
        if shared is not None:
            inner = inner + shared
        return self.conv2(self.norm2(inner).relu())


class DenseStage(nn.Module):
    """An optional transition and the layers. Returns the concatenation of x^0 and the outputs of all layers."""

    def __init__(
        self, in_channels: int, layers: int, growth: int, *, sharing: Sharing | None, transition: bool
    ) -> None:
        super().__init__()
        self.transition: nn.Module = nn.Identity()
        if transition:
            self.transition = nn.Sequential(
                nn.BatchNorm2d(in_channels),
                nn.ReLU(),
                nn.Conv2d(in_channels, in_channels // 2, 1, bias=False),
                nn.AvgPool2d(2),
            )
            in_channels //= 2
        read = [in_channels + (0 if sharing else layer * growth) for layer in range(layers)]
        self.layers = nn.ModuleList(DenseLayer(channels, growth) for channels in read)
        self.shared = Shared1x1(layers - 1, growth, 4 * growth, sharing) if sharing else None
        self.out_channels = in_channels + layers * growth

    def forward(self, x: Tensor) -> Tensor:
        first = self.transition(x)
        outputs: list[Tensor] = []
        for layer in self.layers:
            if self.shared is None:
                outputs.append(layer(torch.cat((first, *outputs), 1)))
            else:
                outputs.append(layer(first, self.shared(outputs) if outputs else None))
        return torch.cat((first, *outputs), 1)


class Stem(nn.Module):
    """Concatenates the image and a 3x3 convolution of it."""

    def __init__(self, in_chans: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_chans, width, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.conv(x)), 1)


class DenseNetBC(StagedClassifier):
    """A DenseNet-BC of three stages for small images.

    Args:
        layers: number of layers of each stage; the depth of the network is 6 layers + 4.
        growth: growth rate k.
        sharing: "lag" (Eq. 9), "ordinal" (Eq. 10), or None for a DenseNet.
        num_classes: number of classes; 0 for no classifier.
        in_chans: number of channels of the image.
        global_pool: type of pooling, as in timm; "" for none.
        drop_rate: dropout rate before the classifier.
    """

    def __init__(
        self,
        layers: int = 16,
        *,
        growth: int = 12,
        sharing: Sharing | None = None,
        num_classes: int = 10,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if sharing not in (None, "lag", "ordinal"):
            raise ValueError(f"sharing must be 'lag', 'ordinal' or None, got {sharing!r}")
        self.stem = Stem(in_chans, 2 * growth)
        channels = in_chans + 2 * growth
        stages: list[nn.Module] = []
        self.feature_info: list[dict[str, Any]] = []
        for index in range(3):
            stage = DenseStage(channels, layers, growth, sharing=sharing, transition=index > 0)
            channels = stage.out_channels
            stages.append(stage)
            self.feature_info.append({"num_chs": channels, "reduction": 2**index, "module": f"stages.{index}"})
        self.stages = nn.Sequential(*stages)
        self._finish(channels, num_classes, global_pool, drop_rate, nn.BatchNorm2d(channels))


FORMS: dict[str, dict[str, Any]] = {
    "densenet100_cifar": {},
    "densenet100_cifar_shared_lag": {"sharing": "lag"},
    "densenet100_cifar_shared_ordinal": {"sharing": "ordinal"},
}
default_cfgs = {name: cifar_config(first_conv="stem.conv") for name in FORMS}
for _name, _options in FORMS.items():
    register_network(_name, DenseNetBC, _options, stages=3)
