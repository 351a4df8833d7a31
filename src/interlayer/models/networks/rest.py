"""ResT: a transformer of four stages with attention to downsampled keys and values.

Paper: ResT: An Efficient Transformer for Visual Recognition, Zhang and Yang, NeurIPS 2021. For an image [B, 3, S, S]
and stages of dims C_1 .. C_4, depths L_1 .. L_4, heads 1, 2, 4, 8 and reductions s = 8, 4, 2, 1:

    stem      conv3x3 stride 2 (C_1 / 2), BN, ReLU; conv3x3 (C_1 / 2), BN, ReLU; conv3x3 stride 2 (C_1)
    stage     conv3x3 stride 2 and BN, except in stage 1; positions x ⊙ sigmoid(DWConv3x3(x)); L blocks
    block     x + EMSA(LN(x)), then x + MLP(LN(x)) of four times the width and GELU
    head      LN, average over the pixels, linear

Convolutions of the stem have no bias, all others do. ResT-Lite has 10,508,300 parameters.

Deviations: `out_norms` applies a LayerNorm to the features of each stage, for detectors (appendix A.3, Table 2). The
classifier does not use these features. Names in the authors' checkpoints are converted.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, ClassVar, Literal

import torch
from timm.layers import DropPath, LayerNorm2d, Mlp, trunc_normal_
from torch import Tensor, nn

from ... import ops
from ...mechanisms.emsa import EfficientAttention, PixelAttention, TokenNorm
from ..config import default_config, register_network
from .classifier import StagedClassifier

HEADS = (1, 2, 4, 8)
REDUCTIONS = (8, 4, 2, 1)


class FeedForward(Mlp):
    """timm's MLP, computed by `interlayer.ops.feed_forward` if only a GELU is applied between its layers."""

    def forward(self, x: Tensor) -> Tensor:
        dropping = self.training and (self.drop1.p or self.drop2.p)
        if dropping or type(self.act) is not nn.GELU or any(m._forward_hooks for m in self.children()):
            return super().forward(x)
        return ops.feed_forward(x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)


class ResTBlock(nn.Module):
    """A pre-norm transformer block over a map, [B, C, H, W]. Tokens are a view of a channels_last map."""

    def __init__(
        self,
        channels: int,
        heads: int,
        reduction: int,
        mixing: bool,
        mlp_ratio: float,
        proj_drop: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.norm1 = TokenNorm(channels)
        self.attn = EfficientAttention(channels, heads, reduction=reduction, mixing=mixing, proj_drop=proj_drop)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = TokenNorm(channels)
        self.mlp = FeedForward(channels, int(channels * mlp_ratio), drop=proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        grid = (x.shape[2], x.shape[3])
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self.drop_path(self.attn(self.norm1(tokens), grid))
        tokens = tokens + self.drop_path(self.mlp(self.norm2(tokens)))
        return tokens.transpose(1, 2).view(x.shape)


class ResT(StagedClassifier):
    """A ResT.

    Args:
        dims: number of channels of each stage.
        depths: number of blocks of each stage.
        heads: number of heads of each stage.
        reductions: factor by which keys and values are downsampled in each stage.
        attention: "emsa", or "msa" for plain multi-head self-attention over all tokens (appendix, Table 1).
        position_kernel: kernel size of the depthwise convolution of the positions; 1 is the group linear layer of
            appendix A.4.
        mlp_ratio: ratio of the hidden channels of an MLP to its input channels.
        out_norms: whether the features of each stage are normalized.
        num_classes: number of classes; 0 for no classifier.
        in_chans: number of channels of the image.
        global_pool: type of pooling, as in timm; "" for none.
        drop_rate: dropout rate before the classifier.
        proj_drop_rate: dropout rate after attention and MLP.
        drop_path_rate: stochastic depth rate of the last block; it increases linearly with depth.
    """

    detection_layers: ClassVar[tuple[str, ...]] = ("out_norms",)  # weights of a classifier do not contain them

    def __init__(
        self,
        dims: tuple[int, ...] = (64, 128, 256, 512),
        depths: tuple[int, ...] = (2, 2, 2, 2),
        *,
        heads: tuple[int, ...] = HEADS,
        reductions: tuple[int, ...] = REDUCTIONS,
        attention: Literal["emsa", "msa"] = "emsa",
        position_kernel: int = 3,
        mlp_ratio: float = 4.0,
        out_norms: bool = False,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if attention not in ("emsa", "msa"):
            raise ValueError(f"attention must be 'emsa' or 'msa', got {attention!r}")
        if not len(dims) == len(depths) == len(heads) == len(reductions):
            raise ValueError(f"expected as many {dims=}, {depths=}, {heads=} and {reductions=}: one for each stage")
        half, total = dims[0] // 2, max(1, sum(depths) - 1)
        self.stem = nn.Sequential(
            nn.Conv2d(in_chans, half, 3, 2, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(inplace=True),
            nn.Conv2d(half, half, 3, 1, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(inplace=True),
            nn.Conv2d(half, dims[0], 3, 2, 1, bias=False),
        )  # fmt: skip
        stages, self.feature_info = [], []
        for index, (channels, depth) in enumerate(zip(dims, depths, strict=True)):
            embed: dict[str, nn.Module] = {}
            if index > 0:
                embed = {"conv": nn.Conv2d(dims[index - 1], channels, 3, 2, 1), "norm": nn.BatchNorm2d(channels)}
            embed["position"] = PixelAttention(channels, position_kernel)
            blocks = [
                ResTBlock(
                    channels,
                    heads[index],
                    reductions[index] if attention == "emsa" else 1,
                    attention == "emsa",
                    mlp_ratio,
                    proj_drop_rate,
                    drop_path_rate * (sum(depths[:index]) + number) / total,
                )
                for number in range(depth)
            ]
            modules = {"embed": nn.Sequential(OrderedDict(embed))} | {str(n): block for n, block in enumerate(blocks)}
            stages.append(nn.Sequential(OrderedDict(modules)))
            self.feature_info.append({"num_chs": channels, "reduction": 4 * 2**index, "module": f"stages.{index}"})
        self.stages = nn.Sequential(*stages)
        self.out_norms = nn.ModuleList(LayerNorm2d(channels, eps=1e-5) for channels in dims if out_norms)
        self._finish(dims[-1], num_classes, global_pool, drop_rate, LayerNorm2d(dims[-1], eps=1e-5))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def last_activation(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def feature_of(self, index: int, x: Tensor) -> Tensor:
        return self.out_norms[index](x) if len(self.out_norms) else x

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        take = super().prune_intermediate_layers(indices, prune_norm, prune_head)
        self.out_norms = self.out_norms[: len(self.stages)]
        return take

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        blocks = r"^stages\.(\d+)" if coarse else [
            (r"^stages\.(\d+)\.embed", (0,)), (r"^stages\.(\d+)\.(\d+)", None), (r"^norm|^out_norms", (99999,)),
        ]  # fmt: skip
        return {"stem": r"^stem", "blocks": blocks}


MODELS: dict[str, dict[str, Any]] = {
    "rest_lite": {"dims": (64, 128, 256, 512), "depths": (2, 2, 2, 2)},
    "rest_small": {"dims": (64, 128, 256, 512), "depths": (2, 2, 6, 2)},
    "rest_base": {"dims": (96, 192, 384, 768), "depths": (2, 2, 6, 2)},
    "rest_large": {"dims": (96, 192, 384, 768), "depths": (2, 2, 18, 2)},
}
default_cfgs = {name: default_config(first_conv="stem.0", classifier="head") for name in MODELS}


for _name, _options in MODELS.items():
    register_network(_name, ResT, _options, stages=4)
