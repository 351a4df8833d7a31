"""HaloNet: a ResNet of bottlenecks with local self-attention as the spatial operation.

Vaswani et al., "Scaling Local Self-Attention for Parameter Efficient Visual Backbones", CVPR 2021: section 2.3, Tables
2 and A2, appendices C and E. For an image [B, 3, S, S], widths w = 64, 128, 256, 512 times r_w:

    stem      conv7x7 stride 2 (64 r_w), BN, SiLU, 3x3 max pooling stride 2      [B, 64, S / 4, S / 4]
              or, as "patch", conv4x4 stride 4, BN, SiLU
    block     conv1x1 to w, BN, SiLU; attention (q and k of w r_qk, v of w r_v channels), BN, SiLU, optional SE;
              conv1x1 to w r_b, BN; plus the shortcut; SiLU
    stages    3, 3, l_3, 3 blocks; the first block of stages 2 to 4 has stride 2
    head      conv1x1 to d_f, BN, SiLU if there is a d_f; global average pool, linear

The shortcut is the identity, or a 1x1 convolution with the stride of the block and BN if the shape changes.
Convolutions have no bias. Stages in `conv_stages` have a 3x3 convolution instead of attention (Table 4). Squeeze-and-
excitation follows the activation after the spatial operation and reduces the channels by 8 (section 4.2.1, appendix
C.4).

The backbones of the detectors (section 4.6, Table 5) are ResNet-50 and -101 of these blocks, with attention in the
three blocks of the last stage and squeeze-and-excitation after every convolution.

Deviations: the "third stage from 4 to 3" blocks in the text must mean the second stage. The printed 12.3M parameters of
H3 correspond to d_f = 1280; with the printed d_f = 1024 it has 11.8M. The hybrid of H7 with convolutions in stages 1 to
3 has 54.5M parameters, not the "about 67 million" of Table 4; with 38 blocks in the third stage instead of 26 it has
67.4M.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from timm.layers import DropPath, SqueezeExcite, get_act_layer
from torch import Tensor, nn

from ...mechanisms.halo import Downsampling, HaloAttention2d, Position
from ..config import default_config, register_network
from .classifier import StagedClassifier

WIDTHS = (64, 128, 256, 512)
HEADS = (4, 8, 8, 8)
SE_RATIO = 1 / 8  # appendix C.4


class HaloBlock(nn.Module):
    """A bottleneck around a spatial operation.

    Args:
        in_channels: number of input channels.
        width: number of channels between the two 1x1 convolutions.
        out_channels: number of output channels.
        spatial: function of width and stride that returns the spatial operation and its number of output channels.
        stride: stride of the spatial operation and the shortcut.
        act_layer: class of the activation.
        se: whether squeeze-and-excitation follows the spatial operation.
        drop_path: stochastic depth rate of the branch.
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        out_channels: int,
        *,
        spatial: Callable[[int, int], tuple[nn.Module, int]],
        stride: int,
        act_layer: type[nn.Module],
        se: bool,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.spatial, inner = spatial(width, stride)
        self.norm2 = nn.BatchNorm2d(inner)
        self.se = SqueezeExcite(inner, rd_ratio=SE_RATIO) if se else nn.Identity()
        self.conv3 = nn.Conv2d(inner, out_channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out_channels)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.act = act_layer()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm1(self.conv1(x)))
        y = self.se(self.act(self.norm2(self.spatial(y))))
        return self.act(self.drop_path(self.norm3(self.conv3(y))) + self.shortcut(x))


class HaloNet(StagedClassifier):
    """A HaloNet.

    Args:
        depths: number of blocks of each stage.
        block: size b of the blocks of the attention.
        halo: width h of the halo of the attention.
        heads: number of heads of each stage.
        r_v: multiplier of the width of the values (Table A1).
        r_b: multiplier of the width of the output.
        r_qk: multiplier of the width of queries and keys.
        r_w: multiplier of all widths.
        final_width: d_f; None for no last convolution.
        conv_stages: stages, numbered from 1, with a 3x3 convolution instead of attention.
        stem: "conv" or "patch".
        act_layer: name of the activation, as in timm.
        se: whether every block has squeeze-and-excitation; "conv" for only those with a convolution.
        centered: whether to use the centered windows of SASA instead of blocks.
        downsampling: "queries", or "pooling" after the attention, as in SASA.
        position: "relative", "absolute" or "none".
        img_size: image size for which absolute positions are learned.
        num_classes: number of classes; 0 for no classifier.
        in_chans: number of channels of the image.
        global_pool: type of pooling, as in timm; "" for none.
        drop_rate: dropout rate before the classifier.
        drop_path_rate: stochastic depth rate of the last block; it increases linearly with depth.
    """

    def __init__(
        self,
        depths: tuple[int, ...] = (3, 3, 10, 3),
        *,
        block: int = 8,
        halo: int = 3,
        heads: tuple[int, ...] = HEADS,
        r_v: float = 1.0,
        r_b: float = 1.0,
        r_qk: float = 1.0,
        r_w: float = 1.0,
        final_width: int | None = None,
        conv_stages: tuple[int, ...] = (),
        stem: Literal["conv", "patch"] = "conv",
        act_layer: str = "silu",
        se: bool | Literal["conv"] = False,
        centered: bool = False,
        downsampling: Downsampling = "queries",
        position: Position = "relative",
        img_size: int = 256,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if stem not in ("conv", "patch"):
            raise ValueError(f"stem must be 'conv' or 'patch', got {stem!r}")
        if se not in (True, False, "conv"):
            raise ValueError(f"se must be True, False or 'conv', got {se!r}")
        if isinstance(conv_stages, int) or not set(conv_stages) <= set(range(1, len(depths) + 1)):
            raise ValueError(f"conv_stages must be some of the stages 1 to {len(depths)}, got {conv_stages!r}")
        widths = {"r_v": r_v, "r_b": r_b, "r_qk": r_qk, "r_w": r_w, "final_width": final_width}
        for option, value in widths.items():
            if value is not None and (not isinstance(value, (int, float)) or value <= 0):
                raise ValueError(f"{option} must be a number above 0, got {value!r}")
        try:
            act: Any = get_act_layer(act_layer)
        except KeyError:
            act = None
        if act is None:
            raise ValueError(f"timm knows no activation {act_layer!r}")
        channels = int(WIDTHS[0] * r_w)
        if stem == "conv":
            first: list[nn.Module] = [nn.Conv2d(in_chans, channels, 7, 2, 3, bias=False)]
            pool: list[nn.Module] = [nn.MaxPool2d(3, 2, 1)]
        else:
            first, pool = [nn.Conv2d(in_chans, channels, 4, 4, bias=False)], []
        self.stem = nn.Sequential(*first, nn.BatchNorm2d(channels), act(), *pool)
        stages, self.feature_info = [], []
        for index, (depth, base, stage_heads) in enumerate(zip(depths, WIDTHS, heads, strict=True)):
            width, convolves = int(base * r_w), index + 1 in conv_stages
            size = -(-img_size // 4 // 2**index)

            def spatial(
                width: int,
                stride: int,
                convolves: bool = convolves,
                stage_heads: int = stage_heads,
                size: int = size,
            ) -> tuple[nn.Module, int]:
                if convolves:
                    return nn.Conv2d(width, width, 3, stride, 1, bias=False), width
                values = int(width * r_v)
                attention = HaloAttention2d(
                    width,
                    values,
                    heads=stage_heads,
                    qk_channels=int(width * r_qk),
                    block=block,
                    halo=halo,
                    stride=stride,
                    centered=centered,
                    downsampling=downsampling,
                    position=position,
                    size=(size * stride, size * stride),
                )
                return attention, values

            blocks: list[nn.Module] = []
            for number in range(depth):
                stride = 2 if index > 0 and number == 0 else 1
                out_channels = int(width * r_b)
                with_se = convolves if se == "conv" else bool(se)
                blocks.append(
                    HaloBlock(
                        channels,
                        width,
                        out_channels,
                        spatial=spatial,
                        stride=stride,
                        act_layer=act,
                        se=with_se,
                        drop_path=drop_path_rate * (sum(depths[:index]) + number) / max(1, sum(depths) - 1),
                    )
                )
                channels = out_channels
            stages.append(nn.Sequential(*blocks))
            self.feature_info.append({"num_chs": channels, "reduction": 4 * 2**index, "module": f"stages.{index}"})
        self.stages = nn.Sequential(*stages)
        self.final: nn.Module = nn.Identity()
        if final_width is not None:
            conv = nn.Conv2d(channels, final_width, 1, bias=False)
            self.final = nn.Sequential(conv, nn.BatchNorm2d(final_width), act())
            channels = final_width
        self._finish(channels, num_classes, global_pool, drop_rate)

    def last_activation(self, x: Tensor) -> Tensor:
        return self.final(x)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.rpartition(".")[2].startswith(("rel_", "abs_"))}


def _family(
    block: int, halo: int, r_v: float, r_b: float, l_3: int, size: int, final_width: int | None
) -> dict[str, Any]:
    return {
        "depths": (3, 3, l_3, 3), "block": block, "halo": halo, "r_v": r_v, "r_b": r_b, "final_width": final_width,
        "img_size": size,
    }  # fmt: skip


# Table A2. The d_f of H3 gives the printed number of parameters.
MODELS: dict[str, dict[str, Any]] = {
    "halo_h0": _family(8, 3, 1.0, 0.5, 7, 256, None),
    "halo_h1": _family(8, 3, 1.0, 1.0, 10, 256, None),
    "halo_h2": _family(8, 3, 1.0, 1.25, 11, 256, None),
    "halo_h3": _family(10, 3, 1.0, 1.5, 12, 320, 1280),
    "halo_h4": _family(12, 2, 1.0, 3.0, 12, 384, 1280),
    "halo_h5": _family(14, 2, 2.5, 2.0, 23, 448, 1536),
    "halo_h6": _family(8, 4, 3.0, 2.75, 24, 512, 1536),
    "halo_h7": _family(10, 3, 4.0, 3.5, 26, 600, 2048),
}
# Table 4: H7 with convolutions in the first stages. The third stage of C123 is longer, which gives the printed 67M.
MODELS |= {
    "halo_h7_c1": {**MODELS["halo_h7"], "conv_stages": (1,), "se": "conv"},
    "halo_h7_c12": {**MODELS["halo_h7"], "conv_stages": (1, 2), "se": "conv"},
    "halo_h7_c123": {**MODELS["halo_h7"], "conv_stages": (1, 2, 3), "se": "conv", "depths": (3, 3, 38, 3)},
}
# Appendix C.1: the layers and widths of ResNet-50, 16 channels per head
_RESNET50: dict[str, Any] = {"depths": (3, 4, 6, 3), "r_b": 4.0, "heads": (4, 8, 16, 32), "act_layer": "relu"}
# Table 5: the backbones of the detectors, pretrained at 512 pixels
_DETECTION = {**_RESNET50, "conv_stages": (1, 2, 3), "se": "conv", "img_size": 512}
MODELS |= {
    "halo_50": {**_RESNET50, "img_size": 256},
    "halo_resnet50_b8": {**_DETECTION, "block": 8, "halo": 3},
    "halo_resnet50_b32": {**_DETECTION, "block": 32, "halo": 3},
    "halo_resnet101_b8": {**_DETECTION, "block": 8, "halo": 3, "depths": (3, 4, 23, 3)},
}
# appendix E: H4 with twice the width, for ImageNet-21k
_BASE128 = {"depths": (3, 4, 12, 3), "block": 8, "halo": 2, "r_b": 4.0, "r_w": 2.0, "img_size": 256}
MODELS |= {
    "halo_h4_base128": _BASE128,
    "halo_h4_base128_patch": {**_BASE128, "stem": "patch"},
    "halo_h4_base128_conv12": {**_BASE128, "conv_stages": (1, 2)},
}
default_cfgs = {
    name: default_config(
        input_size=(3, options["img_size"], options["img_size"]), first_conv="stem.0", classifier="head", crop_pct=0.95
    )
    for name, options in MODELS.items()
}


for _name, _options in MODELS.items():
    register_network(_name, HaloNet, _options, stages=4)
