"""Blocked local self-attention: each block of queries attends to its neighborhood.

Paper: Scaling Local Self-Attention for Parameter Efficient Visual Backbones (HaloNet), CVPR 2021, sections 2.1 and 2.2,
Figures 1 and 2. The map is divided into blocks of b x b pixels. The queries of a block attend to the keys and values
of the block and of a halo of h pixels around it, (b + 2h)² pixels. A query at (i, j) gives a key at (y, x) the weight

    softmax over (y, x) of   s q · k + s' (q_rows · rel_rows[y - i] + q_cols · rel_cols[x - j])

where q_rows and q_cols are the first and second half of the query's channels. The heads share the tables.

    q      [B, heads d, ceil(H / stride), ceil(W / stride)]: query (i, j) is at pixel (stride i, stride j)
    k      [B, heads d, H, W]
    v      [B, heads e, H, W]
    rel_rows, rel_cols   [2 (b + 2h) - 1, d / 2]: entry (b + 2h - 1) + (y - i)
    result [B, heads e, ceil(H / stride), ceil(W / stride)]

The paper does not specify the following. s = s' = 1 / sqrt(d), so position and content have the same scale. Pixels
outside the image are masked (`mask_padding=False` includes them with keys and values of zero). If the size of a map is
not a multiple of b, its last blocks have fewer queries, but the neighborhood of a full block. Logits and softmax are
computed in float32 (float64 for float64), except for the position term of the gathered implementation, which is
computed in the dtype of the queries.

`centered=True` is the window of stand-alone self-attention (SASA): each query attends to the keys at most h pixels away
in both directions, regardless of its block. A block of the size of the map gives global attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .autocast import without_autocast
from .dispatch import Implementation, Operation, triton_implementation


@dataclass(frozen=True)
class HaloPlan:
    """The options of `halo_attention`, with defaults filled in."""

    heads: int
    block: int
    halo: int
    stride: int
    centered: bool
    mask_padding: bool
    scale: float
    position_scale: float

    @property
    def window(self) -> int:
        """The size of a neighborhood in pixels, in each direction."""
        return self.block + 2 * self.halo


def halo_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel_rows: Tensor | None,
    rel_cols: Tensor | None,
    *,
    heads: int,
    block: int,
    halo: int,
    stride: int = 1,
    centered: bool = False,
    mask_padding: bool = True,
    scale: float | None = None,
    position_scale: float | None = None,
) -> Tensor:
    """Computes the attention of each block's queries to its neighborhood.

    See the module docstring for the equation and the shapes.

    Args:
        q: Queries, [B, C, H, W], already subsampled if the stride is not 1.
        k: Keys, [B, C, H, W].
        v: Values, [B, C', H, W].
        rel_rows: The table of relative rows, or None for attention without positions.
        rel_cols: The table of relative columns, or None for attention without positions.
        heads: The number of heads.
        block: The size b of a block, in pixels.
        halo: The width h of the halo, in pixels.
        stride: The number of pixels between queries.
        centered: Whether a query attends only to keys at most `halo` pixels away.
        mask_padding: Whether pixels outside the image are masked.
        scale: The scale s of q · k. Default: 1 / sqrt(d).
        position_scale: The scale s' of the position term. Default: `scale`.
    """
    _check(q, k, v, rel_rows, rel_cols, heads, block, halo, stride)
    scale = (q.shape[1] // heads) ** -0.5 if scale is None else scale
    position_scale = scale if position_scale is None else position_scale
    plan = HaloPlan(heads, block, halo, stride, centered, mask_padding, scale, position_scale)
    return halo_attention_operation(q, k, v, rel_rows, rel_cols, plan)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, rel_rows: Tensor | None, rel_cols: Tensor | None, plan: HaloPlan
) -> Tensor:
    """Computes the blocks sequentially."""
    with without_autocast(q):  # autocast would compute the logits in a lower precision
        return _by_block(q, k, v, rel_rows, rel_cols, plan)


def _by_block(
    q: Tensor, k: Tensor, v: Tensor, rel_rows: Tensor | None, rel_cols: Tensor | None, plan: HaloPlan
) -> Tensor:
    heads, block, halo, stride, window = plan.heads, plan.block, plan.halo, plan.stride, plan.window
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, _, height, width = k.shape
    queries = q.unflatten(1, (heads, -1)).to(dtype)  # [B, heads, d, ., .]
    channels = queries.shape[2]
    margin = (halo, halo + -width % block, halo, halo + -height % block)
    keys = F.pad(k, margin).unflatten(1, (heads, -1)).to(dtype)
    values = F.pad(v, margin).unflatten(1, (heads, -1)).to(dtype)
    result = queries.new_zeros(batch, heads, values.shape[2], *q.shape[2:])
    for top in range(0, height, block):
        for left in range(0, width, block):
            rows = torch.arange(-(-top // stride), -(-min(top + block, height) // stride), device=q.device)
            cols = torch.arange(-(-left // stride), -(-min(left + block, width) // stride), device=q.device)
            if not len(rows) or not len(cols):
                continue
            key_rows = torch.arange(top - halo, top + block + halo, device=q.device)  # positions of the keys
            key_cols = torch.arange(left - halo, left + block + halo, device=q.device)
            query = queries[:, :, :, rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]
            near = (..., slice(top, top + window), slice(left, left + window))
            logits = plan.scale * torch.einsum("bhdij,bhdyx->bhijyx", query, keys[near])
            below = key_rows - stride * rows[:, None]  # [query rows, key rows]
            beside = key_cols - stride * cols[:, None]
            if rel_rows is not None and rel_cols is not None:
                half = channels // 2
                row_logits = torch.einsum(
                    "bhdij,iyd->bhijy", query[:, :, :half], rel_rows[window - 1 + below].to(dtype)
                )
                col_logits = torch.einsum(
                    "bhdij,jxd->bhijx", query[:, :, half:], rel_cols[window - 1 + beside].to(dtype)
                )
                logits = logits + plan.position_scale * (row_logits[..., None] + col_logits[..., None, :])
            allowed = torch.ones(len(rows), len(cols), window, window, dtype=torch.bool, device=q.device)
            if plan.mask_padding:
                allowed &= ((key_rows >= 0) & (key_rows < height))[:, None] & (key_cols >= 0) & (key_cols < width)
            if plan.centered:
                allowed &= (below.abs() <= halo)[:, None, :, None] & (beside.abs() <= halo)[None, :, None, :]
            weights = (
                logits.masked_fill(~allowed, float("-inf")).flatten(-2).softmax(-1).unflatten(-1, (window, window))
            )
            gathered = torch.einsum("bhijyx,bheyx->bheij", weights, values[near])
            result[:, :, :, rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1] = gathered
    return result.flatten(1, 2).to(v.dtype)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel_rows: Tensor | None,
    rel_cols: Tensor | None,
    heads: int,
    block: int,
    halo: int,
    stride: int,
) -> None:
    """Raises a ValueError if the arguments are inconsistent."""
    if block < 1 or halo < 0 or stride < 1 or heads < 1:
        raise ValueError(
            f"expected block, stride and heads of at least 1 and halo of at least 0, got {block=}, {halo=}, {stride=}, "
            f"{heads=}"
        )
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"expected maps of [B, C, H, W], got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}")
    height, width = k.shape[2:]
    expected = (-(-height // stride), -(-width // stride))
    if tuple(q.shape[2:]) != expected:
        raise ValueError(
            f"expected queries of {expected} for keys of {(height, width)} at stride {stride}, got {tuple(q.shape[2:])}"
        )
    if v.shape[2:] != k.shape[2:] or not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"expected keys and values of one size and batch, got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[1] != k.shape[1] or q.shape[1] % heads or v.shape[1] % heads:
        raise ValueError(
            f"expected queries and keys of as many channels, divisible by {heads=}, and values divisible too, got "
            f"{q.shape[1]}, {k.shape[1]} and {v.shape[1]}"
        )
    if (rel_rows is None) != (rel_cols is None):
        raise ValueError("expected both tables of relative positions, or none")
    if rel_rows is not None and rel_cols is not None:
        size = (2 * (block + 2 * halo) - 1, q.shape[1] // heads // 2)
        if q.shape[1] // heads % 2 or tuple(rel_rows.shape) != size or tuple(rel_cols.shape) != size:
            raise ValueError(
                f"expected tables of {size} for {block=}, {halo=} and heads of an even number of channels, here "
                f"{q.shape[1] // heads}, got {tuple(rel_rows.shape)} and {tuple(rel_cols.shape)}"
            )


def _gathered_unsupported_reason(
    q: Tensor, k: Tensor, v: Tensor, rel_rows: Tensor | None, rel_cols: Tensor | None, plan: HaloPlan
) -> str | None:
    fits = plan.block % plan.stride == 0
    return None if fits else f"expected a block divisible by the stride {plan.stride}, got {plan.block}"


def _gathered(
    q: Tensor, k: Tensor, v: Tensor, rel_rows: Tensor | None, rel_cols: Tensor | None, plan: HaloPlan
) -> Tensor:
    """Computes all blocks at once: gathers the neighborhoods for scaled_dot_product_attention."""
    heads, block, halo, stride, window = plan.heads, plan.block, plan.halo, plan.stride, plan.window
    height, width = k.shape[2:]
    side = block // stride  # the number of queries of a block in each direction
    down, across = -(-height // block), -(-width // block)
    queries = _blocks(q, heads, side, (down, across))
    channels = queries.shape[-1]

    places = torch.arange(window, device=q.device) - halo
    offsets = places - stride * torch.arange(side, device=q.device)[:, None]  # [side, window]: from query to key
    bias = queries.new_zeros(1)
    if rel_rows is not None and rel_cols is not None:
        half = channels // 2
        near_rows, near_cols = (table[window - 1 + offsets].to(q.dtype) for table in (rel_rows, rel_cols))
        row_logits = torch.einsum("bhnijd,iyd->bhnijy", queries[..., :half], near_rows)
        col_logits = torch.einsum("bhnijd,jxd->bhnijx", queries[..., half:], near_cols)
        bias = plan.position_scale * (row_logits[..., None] + col_logits[..., None, :]).flatten(3, 4).flatten(4)
    allowed = torch.ones(down, across, side, side, window, window, dtype=torch.bool, device=q.device)
    if plan.mask_padding:
        rows = places + block * torch.arange(down, device=q.device)[:, None]  # [down, window]: positions of the keys
        cols = places + block * torch.arange(across, device=q.device)[:, None]
        allowed &= ((rows >= 0) & (rows < height))[:, None, None, None, :, None]
        allowed &= ((cols >= 0) & (cols < width))[None, :, None, None, None, :]
    if plan.centered:
        allowed &= (offsets.abs() <= halo)[:, None, :, None] & (offsets.abs() <= halo)[None, :, None, :]
    allowed = allowed.flatten(0, 1).flatten(1, 2).flatten(2)  # [blocks, side², window²]
    allowed = allowed | ~allowed.any(-1, keepdim=True)  # padding queries, which are discarded below
    mask = bias.masked_fill(~allowed, float("-inf")) if bias.dim() > 1 else allowed
    keys, values = (_neighborhoods(x, heads, block, halo) for x in (k, v))
    result = _attend(queries.flatten(3, 4), keys, values, mask, plan.scale)
    result = result.unflatten(3, (side, side)).unflatten(2, (down, across))  # [B, heads, down, across, side, side, e]
    result = result.permute(0, 1, 6, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4).flatten(1, 2)
    return result[:, :, : q.shape[2], : q.shape[3]]


def _blocks(q: Tensor, heads: int, side: int, blocks: tuple[int, int]) -> Tensor:
    """Returns the queries of each block, [B, heads, blocks, side, side, d], padded with zeros."""
    down, across = blocks
    padded = F.pad(q, (0, across * side - q.shape[3], 0, down * side - q.shape[2]))
    queries = padded.unflatten(1, (heads, -1)).unflatten(3, (down, side)).unflatten(5, (across, side))
    return queries.permute(0, 1, 3, 5, 4, 6, 2).flatten(2, 3)


def _neighborhoods(x: Tensor, heads: int, block: int, halo: int) -> Tensor:
    """Returns the neighborhood of each block, [B, heads, blocks, window², channels], padded with zeros."""
    (height, width), window = x.shape[2:], block + 2 * halo
    padded = F.pad(x, (halo, halo + -width % block, halo, halo + -height % block))
    windows = padded.unfold(2, window, block).unfold(3, window, block)
    return windows.unflatten(1, (heads, -1)).flatten(3, 4).flatten(4).permute(0, 1, 3, 4, 2)


def halo_windows(height: int, width: int, *, block: int, halo: int, stride: int = 1) -> tuple[Tensor, Tensor]:
    """Returns where the queries and the keys of each block are.

    Args:
        height: The height of the map of keys.
        width: The width of the map of keys.
        block: The size b of a block, in pixels; a multiple of the stride.
        halo: The width h of the halo, in pixels.
        stride: The number of pixels between queries.

    Returns:
        The index of every query in the map of queries, row by row, [blocks, (b / stride)²], and of every key in the
        map of keys, [blocks, (b + 2h)²]; -1 outside the map.
    """
    if block % stride:
        raise ValueError(f"expected a block divisible by the stride {stride}, got {block}")
    down, across = -(-height // block), -(-width // block)

    def numbered(rows: int, cols: int) -> Tensor:  # from 1, because zeros are padding
        return torch.arange(1, rows * cols + 1, device="cpu").view(1, 1, rows, cols)

    queries = _blocks(numbered(-(-height // stride), -(-width // stride)), 1, block // stride, (down, across))
    keys = _neighborhoods(numbered(height, width), 1, block, halo)
    return queries[0, 0].flatten(1) - 1, keys[0, 0].flatten(1) - 1


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of queries [B, heads, blocks, queries, d], with a mask that is broadcast to the logits."""
    if not torch.compiler.is_exporting():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    # ONNX has attention in four dimensions only: heads and blocks become one.
    mask = mask if mask.dim() == 5 else mask.expand(1, q.shape[1], -1, -1, -1)
    queries, keys, values, merged = (tensor.flatten(1, 2) for tensor in (q, k, v, mask))
    result = F.scaled_dot_product_attention(queries, keys, values, attn_mask=merged, scale=scale)
    return result.unflatten(1, q.shape[1:3])


halo_attention_operation = Operation(
    "halo_attention",
    _reference,
    [*triton_implementation("halo_attention"), Implementation("gathered", _gathered, _gathered_unsupported_reason)],
)
