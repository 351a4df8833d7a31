"""Efficient multi-head self-attention, and pixel attention as a position encoding.

Paper: ResT: An Efficient Transformer for Visual Recognition, NeurIPS 2021, appendix A.2 to A.4. For tokens x of a map,

    q = W_q x                                        from all tokens
    k, v = W_k y, W_v y,  y = LN(DWConv(x))          from the map reduced by s: kernel s + 1, stride s, padding s // 2
    one head:    o = softmax(q kᵀ / sqrt(d)) v
    more heads:  o_j = IN(softmax(sum over i of M[j, i] q_i k_iᵀ / sqrt(d) + bias_j)) v_j
    result = W_o o

    x        [B, H W, C], the tokens of an H x W map, row by row
    result   [B, H W, C]

`reduction=1` does not reduce the map. `mixing=False` is plain multi-head self-attention, the "MSA" of Table 1 in the
appendix. Positions are encoded by pixel attention, x ⊙ sigmoid(g(x)), where g is a depthwise convolution. The group
linear layer of appendix A.4, with one group per channel, is the depthwise convolution with kernel size 1.

Deviations: none.
"""

from __future__ import annotations

from torch import Tensor, nn

from .. import ops

Grid = tuple[int, int]


class TokenNorm(nn.LayerNorm):
    """A LayerNorm that is computed by `interlayer.ops.layer_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.layer_norm(input, self.weight, self.bias, self.eps)


class EfficientAttention(nn.Module):
    """Efficient multi-head self-attention (EMSA). See the module docstring for the equations.

    Args:
        channels: C.
        heads: number of heads.
        reduction: the reduction s of the map for keys and values.
        mixing: whether the scores of several heads are mixed and normalized.
        proj_drop: dropout rate after the output projection.
    """

    def __init__(
        self, channels: int, heads: int = 8, *, reduction: int = 1, mixing: bool = True, proj_drop: float = 0.0
    ) -> None:
        super().__init__()
        if heads < 1 or channels % heads:
            raise ValueError(f"channels must be divisible by heads, at least 1, got {channels=} and {heads=}")
        if reduction < 1:
            raise ValueError(f"reduction must be a whole number of at least 1, got {reduction}")
        self.heads = heads
        self.reduction = reduction
        self.scale = (channels // heads) ** -0.5
        self.q = nn.Linear(channels, channels)
        self.kv = nn.Linear(channels, 2 * channels)
        self.proj = nn.Linear(channels, channels)
        self.proj_drop = nn.Dropout(proj_drop)
        self.shrink: nn.Conv2d | None = None
        self.norm: TokenNorm | None = None
        if reduction > 1:
            self.shrink = _Shrink(
                channels, channels, reduction + 1, stride=reduction, padding=reduction // 2, groups=channels
            )
            self.norm = TokenNorm(channels)
        self.mix = nn.Conv2d(heads, heads, 1) if mixing and heads > 1 else None

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        if grid[0] * grid[1] != x.shape[1]:
            raise ValueError(f"expected the tokens of a map of {grid[0]} x {grid[1]} pixels, got {x.shape[1]}")
        source = x
        if self.shrink is not None and self.norm is not None:
            shrunk = self.shrink(x.transpose(1, 2).view(x.shape[0], x.shape[2], *grid))
            source = self.norm(shrunk.flatten(2).transpose(1, 2))
        q = self.q(x)
        k, v = self.kv(source).chunk(2, -1)
        if self.mix is None or self.mix.bias is None:
            attended = ops.attention(q, k, v, heads=self.heads, scale=self.scale)
        else:
            mix = self.mix.weight.flatten(1)
            attended = ops.mixed_attention(q, k, v, mix, self.mix.bias, heads=self.heads, scale=self.scale)
        return self.proj_drop(self.proj(attended))

    def maps(self, q: Tensor, kv: Tensor) -> ops.MixedMaps:
        """Returns the attention maps of several mixed heads, given the outputs of `self.q` and `self.kv`."""
        if self.mix is None or self.mix.bias is None:
            raise ValueError("heads that are not mixed have no maps before and after the mixing")
        k, mix = kv.chunk(2, -1)[0], self.mix.weight.flatten(1)
        return ops.mixed_attention_maps(q, k, mix, self.mix.bias, heads=self.heads, scale=self.scale)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, reduction={self.reduction}, mixing={self.mix is not None}"


class _Shrink(nn.Conv2d):
    """A depthwise convolution that is computed by `interlayer.ops.shrink`."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return super()._conv_forward(input, weight, bias)
        return ops.shrink(input, weight, bias, stride=self.stride[0])


class PixelAttention(nn.Module):
    """Returns x ⊙ sigmoid(g(x)) for a map [B, C, H, W], where g is a depthwise convolution.

    Args:
        channels: C.
        kernel_size: 3 as in the published program, 1 for the group linear layer.
    """

    def __init__(self, channels: int, kernel_size: int = 3) -> None:
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"the kernel of the positions must be odd, to keep the map's size, got {kernel_size}")
        self.conv = nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.conv(x).sigmoid()
