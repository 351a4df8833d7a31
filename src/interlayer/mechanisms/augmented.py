"""Attention-augmented convolution: some channels of a convolution are computed by self-attention over the whole map.

Paper: Bello et al., Attention Augmented Convolutional Networks, ICCV 2019, section 3.

    result = concatenation of Conv(x) and MHA(x)                              out_channels - d_v and d_v channels
    MHA    = W_O softmax_j(q_i · (k_j + r^H_{row j - row i} + r^W_{column j - column i}) / sqrt(d)) v_j

The tables r^H and r^W are shared by the heads of a layer; d is the number of key channels of a head.

    x        [B, in_channels, H, W]
    result   [B, out_channels, ceil(H / stride), ceil(W / stride)]
    tables   rel_rows [2 H' - 1, d], rel_cols [2 W' - 1, d] for attention over a map of H' x W' pixels

Deviations: none where the text is explicit. Keys have `key_ratio` and values `value_ratio` times the output channels
(κ = 2 υ = 0.2), rounded to a multiple of the heads, and keys at least 20 channels per head, as on ImageNet (section
4.2). In a layer with a stride, attention reads the map after a 3x3 average pool with that stride. The tables are
interpolated for maps of another size.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .description import record_description
from .halo import resized_table
from .options import expect_choice, expect_flag, expect_positive

MIN_KEY_CHANNELS = 20  # per head
AugmentedPosition = Literal["relative", "none"]


class AugmentedConv2d(nn.Module):
    """A convolution with channels of self-attention. See the module docstring for the equations.

    Args:
        conv: the convolution that it replaces, whose weights for the first output channels are taken over.
        size: height and width of the input map, for which the tables are learned.
        heads: number of heads.
        key_ratio: κ, key channels as a fraction of the output channels.
        value_ratio: υ, value channels as a fraction of the output channels.
        position: "relative" or "none".
        pooled: whether attention runs on a map of half the height and width, which is then interpolated.
    """

    def __init__(
        self,
        conv: nn.Conv2d,
        size: tuple[int, int],
        *,
        heads: int = 8,
        key_ratio: float = 0.2,
        value_ratio: float = 0.1,
        position: AugmentedPosition = "relative",
        pooled: bool = False,
    ) -> None:
        super().__init__()
        expect_choice("position", position, ("relative", "none"))
        expect_positive("heads", heads)
        expect_flag("pooled", pooled)
        in_channels, out_channels = conv.in_channels, conv.out_channels
        self.in_channels, self.out_channels = in_channels, out_channels  # attributes of a convolution
        self.heads = heads
        self.stride = int(conv.stride[0])
        self.pooled = pooled
        self.key_channels = max(round(key_ratio * out_channels / heads), MIN_KEY_CHANNELS) * heads
        self.value_channels = max(round(value_ratio * out_channels / heads), 1) * heads
        if self.value_channels >= out_channels:
            raise ValueError(
                f"expected value_ratio and heads that leave channels to the convolution, got {self.value_channels} "
                f"channels of values and {out_channels} output channels"
            )
        self.conv = type(conv)(
            in_channels, out_channels - self.value_channels, conv.kernel_size, conv.stride, conv.padding,  # type: ignore[arg-type]
            bias=conv.bias is not None,
        )  # fmt: skip
        self.qkv = nn.Conv2d(in_channels, 2 * self.key_channels + self.value_channels, 1, bias=False)
        self.proj = nn.Conv2d(self.value_channels, self.value_channels, 1, bias=False)
        self.rel_rows = self.rel_cols = None
        if position == "relative":
            height, width = (_pooled_size(n, self.stride * (2 if pooled else 1)) for n in size)
            per_head = self.key_channels // heads
            self.rel_rows = nn.Parameter(torch.empty(2 * height - 1, per_head))
            self.rel_cols = nn.Parameter(torch.empty(2 * width - 1, per_head))
            for table in (self.rel_rows, self.rel_cols):
                nn.init.normal_(table, std=per_head**-0.5)
        self.take_over(conv)
        record_description(self)

    def forward(self, x: Tensor) -> Tensor:
        convolved = self.conv(x)
        attended = self.proj(self._attend(self._pool(x)))
        if attended.shape[2:] != convolved.shape[2:]:
            attended = F.interpolate(attended, size=convolved.shape[2:], mode="bilinear", align_corners=False)
        return torch.cat((convolved, attended), 1)

    def _pool(self, x: Tensor) -> Tensor:
        for _ in range((self.stride > 1) + self.pooled):
            x = F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)
        return x

    def _attend(self, x: Tensor) -> Tensor:
        keys, values = self.key_channels, self.value_channels
        q, k, v = (
            part.unflatten(1, (self.heads, -1)).flatten(3).transpose(2, 3)  # [B, heads, H W, d]
            for part in self.qkv(x).split((keys, keys, values), 1)
        )
        height, width = x.shape[2:]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=self._position_scores(q, height, width))
        return attended.transpose(2, 3).flatten(1, 2).unflatten(2, (height, width))

    def _position_scores(self, q: Tensor, height: int, width: int) -> Tensor | None:
        """Returns q_i · (r^H + r^W) / sqrt(d) for all pairs of pixels, [B, heads, H W, H W], or None."""
        if self.rel_rows is None or self.rel_cols is None:
            return None
        queries = q.unflatten(2, (height, width)) * q.shape[-1] ** -0.5
        rows, cols = _relative(self.rel_rows, height), _relative(self.rel_cols, width)  # [n, n, d]
        by_row = torch.einsum("bhyxd,yjd->bhyxj", queries, rows.to(q.dtype))
        by_col = torch.einsum("bhyxd,xjd->bhyxj", queries, cols.to(q.dtype))
        return (by_row[..., :, None] + by_col[..., None, :]).flatten(4).flatten(2, 3).to(q.dtype)

    @torch.no_grad()
    def take_over(self, conv: nn.Conv2d) -> None:
        """Initialize the convolution from the first output channels of a trained one."""
        if conv.weight.is_meta and not self.conv.weight.is_meta:
            return
        kept = self.conv.out_channels
        self.conv.weight.copy_(conv.weight[:kept])
        if self.conv.bias is not None and conv.bias is not None:
            self.conv.bias.copy_(conv.bias[:kept])

    def describe(self) -> dict[str, str]:
        """Returns the properties that the tensors do not determine."""
        return {"mechanism": "AugmentedConv2d", "heads": str(self.heads), "pooled": str(self.pooled)}

    def extra_repr(self) -> str:
        return f"heads={self.heads}, stride={self.stride}, pooled={self.pooled}"


def _pooled_size(size: int, stride: int) -> int:
    return -(-size // stride)


def _relative(table: Tensor, size: int) -> Tensor:
    """Returns the entries of a table for every pair of positions, [size, size, d]."""
    table = resized_table(table.t(), 2 * size - 1).t()
    positions = torch.arange(size, device=table.device)
    return table[positions[None, :] - positions[:, None] + size - 1]
