"""Local self-attention in place of a spatial convolution.

Paper: Scaling Local Self-Attention for Parameter Efficient Visual Backbones (HaloNet), CVPR 2021, section 2.

    q = W_q x at every stride-th pixel, k = W_k x, v = W_v x        1x1 convolutions without bias
    result = halo_attention(q, k, v, relative tables)               `interlayer.ops.halo_attention`

There is no output projection: the results of the heads are concatenated along the channels.

With `downsampling="pooling"`, as in SASA, all pixels are queries and the result is averaged over stride x stride pixels
(section 2.2). HaloNet's strided queries need a quarter of the operations for a stride of 2.

    x        [B, in_channels, H, W]
    result   [B, out_channels, ceil(H / stride), ceil(W / stride)]

Deviations: none. See `interlayer.ops.halo_attention` for the choices that the text does not specify.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from .description import record_description
from .options import expect_choice, expect_flag, expect_whole

Position = Literal["relative", "absolute", "none"]
Downsampling = Literal["queries", "pooling"]


class HaloAttention2d(nn.Module):
    """Blocked local self-attention over a map, which can replace a 3x3 convolution.

    Args:
        in_channels: channels of the map.
        out_channels: channels of the values and of the result. Default: `in_channels`.
        heads: number of heads.
        qk_channels: channels of queries and keys. Default: `in_channels`.
        block: height and width b of a block of queries, in pixels.
        halo: number h of pixels around a block that are also read.
        stride: distance of the queries in pixels. A stride of 2 halves the map.
        centered: whether each query attends to the pixels at most `halo` away instead of its block's neighborhood
            (SASA).
        position: "relative", "absolute" for factorized encodings of row and column that are added to x (appendix F), or
            "none".
        size: height and width of the map for which absolute encodings are learned. They are interpolated for other
            sizes. Only used if position="absolute".
        mask_padding: whether pixels outside the image are masked.
        downsampling: how a stride above 1 is computed: by strided "queries", or by average "pooling" after the
            attention of all pixels (SASA). Averages at the border are over the pixels of the map.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        *,
        heads: int = 8,
        qk_channels: int | None = None,
        block: int = 8,
        halo: int = 3,
        stride: int = 1,
        centered: bool = False,
        position: Position = "relative",
        size: tuple[int, int] | None = None,
        mask_padding: bool = True,
        downsampling: Downsampling = "queries",
    ) -> None:
        super().__init__()
        expect_choice("position", position, ("relative", "absolute", "none"))
        expect_choice("downsampling", downsampling, ("queries", "pooling"))
        expect_flag("centered", centered)
        for name, value in (("block", block), ("halo", halo), ("stride", stride), ("heads", heads)):
            expect_whole(name, value)
        out_channels = in_channels if out_channels is None else out_channels
        qk_channels = in_channels if qk_channels is None else qk_channels
        if heads < 1 or qk_channels % (2 * heads) or out_channels % heads:
            raise ValueError(
                f"expected qk_channels divisible by twice the heads and out_channels divisible by heads={heads}, got "
                f"{qk_channels} and {out_channels}"
            )
        if block < 1 or halo < 0 or stride < 1:
            raise ValueError(
                f"expected block and stride of at least 1, halo of at least 0, got {block=}, {stride=}, {halo=}"
            )
        if position == "absolute" and size is None:
            raise ValueError("position='absolute' learns an encoding of each row and column: give size=(height, width)")
        self.in_channels, self.out_channels = in_channels, out_channels  # attributes of a convolution
        self.heads = heads
        self.block = block
        self.halo = halo
        self.stride = stride
        self.centered = centered
        self.mask_padding = mask_padding
        self.position = position
        self.downsampling = downsampling
        self.query = nn.Conv2d(in_channels, qk_channels, 1, bias=False)
        self.key = nn.Conv2d(in_channels, qk_channels, 1, bias=False)
        self.value = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.rel_rows = self.rel_cols = self.abs_rows = self.abs_cols = None
        if position == "relative":
            half = qk_channels // heads // 2
            entries = 2 * (block + 2 * halo) - 1
            self.rel_rows = nn.Parameter(torch.empty(entries, half))
            self.rel_cols = nn.Parameter(torch.empty(entries, half))
        elif size is not None and position == "absolute":
            self.abs_rows = nn.Parameter(torch.empty(in_channels, size[0]))
            self.abs_cols = nn.Parameter(torch.empty(in_channels, size[1]))
        for table in (self.rel_rows, self.rel_cols):
            if table is not None:
                nn.init.normal_(table, std=(qk_channels // heads) ** -0.5)
        for table in (self.abs_rows, self.abs_cols):
            if table is not None:
                nn.init.normal_(table, std=0.02)
        record_description(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.abs_rows is not None and self.abs_cols is not None:
            rows, cols = (resized_table(t, n) for t, n in ((self.abs_rows, x.shape[2]), (self.abs_cols, x.shape[3])))
            x = x + (rows[:, :, None] + cols[:, None, :]).to(x.dtype)
        stride = self.stride if self.downsampling == "queries" else 1  # of the queries
        sampled = x if stride == 1 else x[:, :, ::stride, ::stride]
        result = ops.halo_attention(
            self.query(sampled),
            self.key(x),
            self.value(x),
            self.rel_rows,
            self.rel_cols,
            heads=self.heads,
            block=self.block,
            halo=self.halo,
            stride=stride,
            centered=self.centered,
            mask_padding=self.mask_padding,
        )
        return result if stride == self.stride else F.avg_pool2d(result, self.stride, ceil_mode=True)

    def attention_windows(self, height: int, width: int) -> tuple[tuple[tuple[int, int], Tensor, int], ...]:
        """Returns the size of the map of queries, the positions of each block's queries in it and their stride.

        The same of keys follows, whose stride is one. See `interlayer.ops.halo_windows`.
        """
        stride = self.stride if self.downsampling == "queries" else 1
        queries, keys = ops.halo_windows(height, width, block=self.block, halo=self.halo, stride=stride)
        return ((-(-height // stride), -(-width // stride)), queries, stride), ((height, width), keys, 1)

    @torch.no_grad()
    def resize(self, block: int, halo: int) -> None:
        """Change block and halo of a trained layer by linear interpolation of its relative tables (appendix E)."""
        expect_whole("block", block)
        expect_whole("halo", halo)
        if block < 1 or halo < 0 or block % self.stride:
            raise ValueError(
                f"expected a block of at least 1, divisible by the stride {self.stride}, and a halo of at least 0, got "
                f"{block=}, {halo=}"
            )
        entries = 2 * (block + 2 * halo) - 1
        if self.rel_rows is not None and self.rel_cols is not None:
            for name, table in (("rel_rows", self.rel_rows), ("rel_cols", self.rel_cols)):
                resized = resized_table(table.t(), entries).t().contiguous()
                setattr(self, name, nn.Parameter(resized, requires_grad=table.requires_grad))
        self.block, self.halo = block, halo

    def describe(self) -> dict[str, str]:
        """Returns the properties that the tensors do not determine: tables depend only on the sum b + 2h."""
        names = ("heads", "block", "halo", "stride", "centered", "mask_padding", "downsampling")
        return {"mechanism": "HaloAttention2d"} | {name: str(getattr(self, name)) for name in names}

    def extra_repr(self) -> str:
        sizes = f"block={self.block}, halo={self.halo}, stride={self.stride}"
        how = "" if self.stride == 1 else f", downsampling={self.downsampling!r}"
        return f"heads={self.heads}, {sizes}{how}, position={self.position!r}"


def resized_table(table: Tensor, size: int) -> Tensor:
    """Interpolate [channels, n] to [channels, size] linearly, with aligned corners."""
    if table.shape[1] == size:
        return table
    if size == 1:
        return table[:, table.shape[1] // 2, None]
    return F.interpolate(table[None], size=size, mode="linear", align_corners=True)[0]


def resize_halo(model: nn.Module, *, block: int, halo: int) -> nn.Module:
    """Change block and halo of all `HaloAttention2d` of a trained model, in place, and return it (appendix E)."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, HaloAttention2d)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no HaloAttention2d")
    for layer in layers:
        if block % layer.stride:
            raise ValueError(f"expected a block divisible by every stride, got {block} and a stride of {layer.stride}")
    for layer in layers:
        layer.resize(block, halo)
    return model


def fit_halo_tables(
    model: nn.Module, tensors: Mapping[str, Tensor], descriptions: Mapping[str, dict[str, str]]
) -> tuple[dict[str, Tensor], dict[str, dict[str, str]]]:
    """Interpolate the tables of weights that were trained with another block, halo or image size to fit `model`.

    Args:
        model: the network to be loaded.
        tensors: weights by name, with tables of any size.
        descriptions: the saved description of each mechanism.

    Returns:
        The weights, and the descriptions without block and halo.
    """
    fitted, kept = dict(tensors), dict(descriptions)
    for path, module in model.named_modules():
        if not isinstance(module, HaloAttention2d):
            continue
        for entry, across in (("rel_rows", True), ("rel_cols", True), ("abs_rows", False), ("abs_cols", False)):
            name, own = f"{path}.{entry}", getattr(module, entry)
            if own is None or name not in fitted or fitted[name].dim() != 2:
                continue
            table = fitted[name].t() if across else fitted[name]
            size = own.shape[0] if across else own.shape[1]
            fitted[name] = (resized_table(table, size).t() if across else resized_table(table, size)).contiguous()
        if path in kept:
            kept[path] = {key: value for key, value in kept[path].items() if key not in ("block", "halo")}
    return fitted, kept
