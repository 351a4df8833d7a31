"""Pre-activated ResNets for 32-pixel images, which timm lacks.

He et al., "Identity Mappings in Deep Residual Networks", ECCV 2016; as the CIFAR baselines of "Recurrence along Depth"
(RLA, section 4.1, Table 8). Shapes, for an image [B, 3, 32, 32]:

    stem      conv3x3(16), BN, ReLU                     [B, 16, 32, 32]
    stage s   n blocks of width 16, 32, 64 (x 4 in a bottleneck), the first of stages 2 and 3 strided by 2
    head      BN, ReLU, global average pool, linear

A block adds its branch to its input: x' = shortcut(x) + conv(...(ReLU(BN(x)))). The shortcut is the identity, or, where
width or stride changes, a 1x1 convolution of the raw input without norm. Convolutions have no bias.

Deviations: the paper's count of ResNet-164 (1.72M on CIFAR-10) fits only if every convolution has a bias; here, as in
the original, none has (1,703,290).
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import SelectAdaptivePool2d
from timm.models import build_model_with_cfg, register_model
from timm.models._features import feature_take_indices
from timm.models._manipulate import checkpoint_seq
from torch import Tensor, nn

from .classifier import Classifier
from .config import default_config

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class PreActBlock(nn.Module):
    """A pre-activated residual block: two 3x3 convolutions, or the 1x1, 3x3, 1x1 bottleneck.

    Args:
        in_channels: channels of the input.
        width: channels of the 3x3 convolutions.
        bottleneck: whether the block is the bottleneck, whose output has 4 times the width.
        stride: stride of the (first) 3x3 convolution.
    """

    def __init__(self, in_channels: int, width: int, *, bottleneck: bool, stride: int = 1) -> None:
        super().__init__()
        out_channels = width * 4 if bottleneck else width
        kernels = (1, 3, 1) if bottleneck else (3, 3)
        channels = [in_channels, *[width] * (len(kernels) - 1), out_channels]
        strided = kernels.index(3)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in channels[:-1])
        self.convs = nn.ModuleList(
            nn.Conv2d(channels[i], channels[i + 1], k, stride if i == strided else 1, k // 2, bias=False)
            for i, k in enumerate(kernels)
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            y = conv(norm(y).relu())
        return self.shortcut(x) + y


class PreActResNet(Classifier):
    """A pre-activated ResNet of three stages for small images.

    Args:
        blocks: blocks of each stage.
        bottleneck: the kind of block.
        widths: channels of the 3x3 convolutions of each stage; the stem has those of the first.
        num_classes: outputs of the classifier; 0 for none.
        in_chans: channels of the image.
        global_pool: timm's name of a pooling, "" for none.
        drop_rate: dropout before the classifier.
    """

    def __init__(
        self,
        blocks: int,
        *,
        bottleneck: bool = False,
        widths: tuple[int, ...] = (16, 32, 64),
        num_classes: int = 10,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.stem = nn.Sequential(
            nn.Conv2d(in_chans, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
        channels = widths[0]
        stages, self.feature_info = [], []
        for index, width in enumerate(widths):
            stage = []
            for position in range(blocks):
                stride = 2 if index > 0 and position == 0 else 1
                stage.append(PreActBlock(channels, width, bottleneck=bottleneck, stride=stride))
                channels = width * 4 if bottleneck else width
            stages.append(nn.Sequential(*stage))
            self.feature_info.append({"num_chs": channels, "reduction": 2**index, "module": f"stages.{index}"})
        self.stages = nn.Sequential(*stages)
        self.depth = len(stages)  # of the whole network: the last norm belongs to the last stage, pruned or not
        self.norm: nn.Module = nn.BatchNorm2d(channels)
        self.num_features = self.head_hidden_size = channels
        self.global_pool = self.pool_of(global_pool)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(channels, num_classes) if num_classes else nn.Identity()
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"stem": r"^stem", "blocks": r"^stages\.(\d+)" if coarse else [(r"^stages\.(\d+)\.(\d+)", None)]}

    def pool_of(self, global_pool: str) -> nn.Module:
        return SelectAdaptivePool2d(pool_type=global_pool, flatten=bool(global_pool))

    def _run_stage(self, stage: nn.Module, x: Tensor) -> Tensor:
        if self.grad_checkpointing and self.training:
            return checkpoint_seq(stage, x)
        return stage(x)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = self._run_stage(stage, x)
        return self.norm(x).relu()

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Features of the chosen stages, as timm's networks give them."""
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW', got {output_fmt!r}")
        take, last = feature_take_indices(len(self.stages), indices)
        x = self.stem(x)
        intermediates = []
        for index, stage in enumerate(self.stages):
            if stop_early and index > last:
                break
            x = self._run_stage(stage, x)
            finished = index == self.depth - 1
            if index in take:
                intermediates.append(self.norm(x).relu() if norm and finished else x)
        if intermediates_only:
            return intermediates
        return (self.norm(x).relu() if finished else x), intermediates

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        take, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.head_drop(self.global_pool(x))
        return x if pre_logits else self.head(x)


# Depth = 6 n + 2 for blocks of two convolutions, 9 n + 2 for bottlenecks.
DEPTHS: dict[str, dict[str, Any]] = {
    "preresnet20_cifar": {"blocks": 3},
    "preresnet56_cifar": {"blocks": 9},
    "preresnet110_cifar": {"blocks": 18},
    "preresnet164_cifar": {"blocks": 18, "bottleneck": True},
}
default_cfgs = {
    name: default_config(
        num_classes=10,
        input_size=(3, 32, 32),
        crop_pct=1.0,
        mean=CIFAR_MEAN,
        std=CIFAR_STD,
        first_conv="stem.0",
        classifier="head",
    )
    for name in DEPTHS
}


def _register(name: str, options: dict[str, Any]) -> None:
    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        feature_cfg = {"out_indices": (0, 1, 2), "feature_cls": "getter"}
        return build_model_with_cfg(PreActResNet, name, pretrained, feature_cfg=feature_cfg, **{**options, **kwargs})

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__doc__ = f"Pre-activated ResNet for 32-pixel images, {options['blocks']} blocks a stage."
    register_model(entrypoint)


for _name, _options in DEPTHS.items():
    _register(_name, _options)
