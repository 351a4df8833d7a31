"""Context broadcasting: uniform attention for transformers, in one line.

Paper: Scratching Visual Transformer's Back with Uniform Attention, ICCV 2023, section 3.2.

    CB    x_i' = (x_i + mean over tokens j of x_j) / 2           Eq. 1; no parameters
    CB_S  x_i' = x_i + Λ ⊙ mean over tokens j of x_j             one parameter for each channel

The mean is over all tokens, class and other prefix tokens included.

    x   [B, N, C], or [B, H, W, C]

Uniform attention can also be a head of self-attention (Table 1), o = mean over tokens j of v_j: `UniformHeadAttention`.

Deviations: none. The text does not say where Λ starts; here at zero, where CB_S is the identity. Of (B), "comparable"
parameters, it does not say how; here the other heads' queries and keys are widened.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..ops.broadcast_context import add_average
from .description import record_description
from .options import expect_choice, expect_flag
from .protocol import BlockMechanism, BlockValues, MemoryScope, Place


class ContextBroadcast(BlockMechanism):
    """Adds the average token to every token. See the module docstring for the equations.

    As a block's mechanism it broadcasts what enters a component, such as the MLP, or what leaves it.

    Args:
        channels: C, for the scaled form; it is not needed for the other.
        scaled: CB_S instead of CB.
    """

    memory_scope: MemoryScope = "none"
    title = "context broadcasting"
    placement_options = ("where", "blocks")  # without tensors, a file could not tell its places: they are compared

    def __init__(self, channels: int | None = None, *, scaled: bool = False) -> None:
        super().__init__()
        expect_flag("scaled", scaled)
        if scaled and channels is None:
            raise ValueError("the scaled form has one parameter for each channel: give channels=")
        self.scale = nn.Parameter(torch.zeros(channels)) if scaled and channels is not None else None
        self.before = False  # whether it broadcasts the input of the component that holds it, instead of the output
        record_description(self)

    def enter(self, x: Tensor, memory: Any, place: Place) -> tuple[Tensor, Any]:
        return (self(x) if self.before else x), memory

    def leave(self, output: Tensor, values: BlockValues, memory: Any, place: Place) -> tuple[Tensor, Any]:
        return (output if self.before else self(output)), memory

    def forward(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """
        Args:
            x: tokens, [B, N, C] or [B, H, W, C].
            chosen: [B, N], True for the tokens of [B, N, C] that count in the average and receive it; all of them
                unless given.
        """
        if chosen is None:
            return ops.broadcast_context(x, self.scale)
        mask = chosen[..., None]
        average = (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)
        return torch.where(mask, add_average(x, average, self.scale), x)

    def describe(self) -> dict[str, str]:
        return {
            "mechanism": "ContextBroadcast",
            "scaled": str(self.scale is not None),
            "before": str(self.before),
        }

    def extra_repr(self) -> str:
        return f"scaled={self.scale is not None}"


UniformHead = Literal["head", "wide_head", "extra_head"]


class UniformHeadAttention(nn.Module):
    """Multi-head self-attention one head of which is uniform: it gives every token the average of its values.

    Args:
        channels: C.
        heads: heads of the attention whose place it takes.
        kind: "head" for one of them replaced, its queries and keys gone (A); "wide_head" for the same with the others'
            queries and keys widened to as many channels as before (B); "extra_head" for one more (C).
        bias: whether queries, keys and values have one.
        proj_bias: whether the projection behind the heads has one.
    """

    def __init__(
        self, channels: int, heads: int, kind: UniformHead = "head", *, bias: bool = True, proj_bias: bool = True
    ) -> None:
        super().__init__()
        expect_choice("kind", kind, ("head", "wide_head", "extra_head"))
        if heads < 1 or channels % heads:
            raise ValueError(f"channels must be divisible by heads, at least 1, got {channels=} and {heads=}")
        if heads < 2 and kind != "extra_head":
            raise ValueError(f"{kind!r} replaces one of several heads, got {heads}")
        self.kind = kind
        self.width = channels // heads
        self.learned = heads if kind == "extra_head" else heads - 1
        self.key_width = channels // self.learned // 2 * 2 if kind == "wide_head" else self.width
        self.qk = nn.Linear(channels, 2 * self.learned * self.key_width, bias=bias)
        self.v = nn.Linear(channels, (self.learned + 1) * self.width, bias=bias)
        self.proj = nn.Linear((self.learned + 1) * self.width, channels, bias=proj_bias)
        record_description(self)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ValueError("a uniform head is the average of all tokens: it takes no mask")
        q, k = self.qk(x).unflatten(2, (2, self.learned, -1)).permute(2, 0, 3, 1, 4)
        v = self.v(x).unflatten(2, (self.learned + 1, -1)).transpose(1, 2)  # [B, heads, N, d]
        attended = F.scaled_dot_product_attention(q, k, v[:, :-1], scale=self.width**-0.5)
        uniform = v[:, -1:].mean(2, keepdim=True).expand_as(v[:, -1:])
        return self.proj(torch.cat((attended, uniform), 1).transpose(1, 2).flatten(2))

    @torch.no_grad()
    def take_over(self, qkv: nn.Linear, proj: nn.Linear) -> None:
        """Start from a trained attention: what it has of heads that are still there. The last of its heads is replaced.

        New queries' and keys' channels start as they are drawn and at zero, so the scores are the old ones; values of
        an extra head as drawn, its part of the projection at zero.
        """
        old = qkv.weight.unflatten(0, (3, -1, self.width))  # [3, heads, d, C]
        new = self.qk.weight.unflatten(0, (2, self.learned, self.key_width))
        new[1] = 0
        new[:, :, : self.width] = old[:2, : self.learned]
        rows, columns = min(len(self.v.weight), len(old[2].flatten(0, 1))), proj.weight.shape[1]
        self.v.weight[:rows] = old[2].flatten(0, 1)[:rows]
        if qkv.bias is not None:
            old_bias = qkv.bias.unflatten(0, (3, -1, self.width))
            new_bias = self.qk.bias.unflatten(0, (2, self.learned, self.key_width))
            new_bias.zero_()
            new_bias[:, :, : self.width] = old_bias[:2, : self.learned]
            self.v.bias.zero_()
            self.v.bias[:rows] = old_bias[2].flatten()[:rows]
        self.proj.weight.zero_()
        self.proj.weight[:, :columns] = proj.weight
        if proj.bias is not None:
            self.proj.bias.copy_(proj.bias)

    def describe(self) -> dict[str, str]:
        return {"mechanism": "UniformHeadAttention", "kind": self.kind, "heads": str(self.learned)}

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, learned={self.learned}"
