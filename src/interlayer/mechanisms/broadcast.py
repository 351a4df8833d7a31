"""Context broadcasting: uniform attention for transformers.

Paper: Scratching Visual Transformer's Back with Uniform Attention, ICCV 2023, section 3.2.

    CB    x_i' = (x_i + mean over tokens j of x_j) / 2           Eq. 1; no parameters
    CB_S  x_i' = x_i + Λ ⊙ mean over tokens j of x_j             one parameter for each channel

The mean is over all tokens, including class and other prefix tokens.

    x   [B, N, C], or [B, H, W, C]

Uniform attention can also be a head of self-attention (Table 1), o = mean over tokens j of v_j: `UniformHeadAttention`.

Deviations: none. The text does not specify the initial value of Λ; here it is zero, so that CB_S starts as the
identity. It does not specify how (B) obtains a "comparable" number of parameters; here the queries and keys of the
other heads are widened, and their scores are scaled by 1 / sqrt(d) with d the channels of these keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..ops.broadcast_context import add_average
from .description import METADATA, record_description
from .options import expect_choice, expect_flag
from .protocol import BlockMechanism, BlockValues, MemoryScope, Place


class ContextBroadcast(BlockMechanism):
    """Adds the average token to every token. See the module docstring for the equations.

    As a mechanism of a component, such as the MLP, it is applied to the output or, if `before` is set, to the input.

    Args:
        channels: C, required if `scaled` is True.
        scaled: whether to use CB_S instead of CB.
    """

    memory_scope: MemoryScope = "none"
    title = "context broadcasting"
    placement_options = ("where", "blocks")  # compared on loading, because CB has no tensors to compare

    def __init__(self, channels: int | None = None, *, scaled: bool = False) -> None:
        super().__init__()
        expect_flag("scaled", scaled)
        if scaled and channels is None:
            raise ValueError("the scaled form has one parameter for each channel: give channels=")
        self.scale = nn.Parameter(torch.zeros(channels)) if scaled and channels is not None else None
        self.before = False  # whether it is applied to the input of the component instead of its output
        record_description(self)

    def enter(self, x: Tensor, memory: Any, place: Place) -> tuple[Tensor, Any]:
        return (self(x) if self.before else x), memory

    def leave(self, output: Tensor, values: BlockValues, memory: Any, place: Place) -> tuple[Tensor, Any]:
        return (output if self.before else self(output)), memory

    def forward(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """
        Args:
            x: tokens, [B, N, C] or [B, H, W, C].
            chosen: mask [B, N], True for the tokens of [B, N, C] that are averaged and changed. Default: all tokens.
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
    """Multi-head self-attention with one uniform head, which returns the average of its values for every token.

    Args:
        channels: C.
        heads: number of heads of the attention that it replaces.
        kind: "head" replaces one head, which has no queries and keys (A). "wide_head" also widens the queries and keys
            of the other heads to the original number of channels (B). "extra_head" adds a head (C).
        bias: whether the projections to queries, keys and values have a bias.
        proj_bias: whether the output projection has a bias.
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
        self.scale = self.key_width**-0.5
        self.qk = nn.Linear(channels, 2 * self.learned * self.key_width, bias=bias)
        self.v = nn.Linear(channels, (self.learned + 1) * self.width, bias=bias)
        self.proj = nn.Linear((self.learned + 1) * self.width, channels, bias=proj_bias)
        record_description(self)
        self.register_load_state_dict_pre_hook(_fit_saved_scale)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ValueError("a uniform head is the average of all tokens: it takes no mask")
        q, k = self.qk(x).unflatten(2, (2, self.learned, -1)).permute(2, 0, 3, 1, 4)
        v = self.v(x).unflatten(2, (self.learned + 1, -1)).transpose(1, 2)  # [B, heads, N, d]
        attended = F.scaled_dot_product_attention(q, k, v[:, :-1], scale=self.scale)
        uniform = v[:, -1:].mean(2, keepdim=True).expand_as(v[:, -1:])
        return self.proj(torch.cat((attended, uniform), 1).transpose(1, 2).flatten(2))

    @torch.no_grad()
    def take_over(self, qkv: nn.Linear, proj: nn.Linear) -> None:
        """Initialize from the weights of a trained attention. The uniform head replaces its last head.

        Additional key channels are zero, and queries are multiplied by the ratio of the two scales, so the scores do
        not change. The values of an extra head keep their random initialization, and its columns of the output
        projection are zero.
        """
        old = qkv.weight.unflatten(0, (3, -1, self.width))  # [3, heads, d, C]
        new = self.qk.weight.unflatten(0, (2, self.learned, self.key_width))
        new[1] = 0
        new[:, :, : self.width] = old[:2, : self.learned]
        new[0, :, : self.width] *= self.query_factor
        rows, columns = min(len(self.v.weight), len(old[2].flatten(0, 1))), proj.weight.shape[1]
        self.v.weight[:rows] = old[2].flatten(0, 1)[:rows]
        if qkv.bias is not None:
            old_bias = qkv.bias.unflatten(0, (3, -1, self.width))
            new_bias = self.qk.bias.unflatten(0, (2, self.learned, self.key_width))
            new_bias.zero_()
            new_bias[:, :, : self.width] = old_bias[:2, : self.learned]
            new_bias[0] *= self.query_factor
            self.v.bias.zero_()
            self.v.bias[:rows] = old_bias[2].flatten()[:rows]
        self.proj.weight.zero_()
        self.proj.weight[:, :columns] = proj.weight
        if proj.bias is not None:
            self.proj.bias.copy_(proj.bias)

    @property
    def query_factor(self) -> float:
        """The factor of queries for scores scaled by 1 / sqrt(C / heads), which this layer scales by `scale`."""
        return self.width**-0.5 / self.scale

    def describe(self) -> dict[str, str]:
        heads = {"kind": self.kind, "heads": str(self.learned)}
        return {"mechanism": "UniformHeadAttention", **heads, "scale": "keys"}

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, learned={self.learned}"


def fit_uniform_heads(
    model: nn.Module, tensors: Mapping[str, Tensor], descriptions: Mapping[str, dict[str, str]]
) -> dict[str, Tensor]:
    """Returns weights that fit the scale of the scores in `model`.

    Earlier versions scaled the scores of a wide head by 1 / sqrt(C / heads), and their files do not describe the scale.
    The queries in such files are multiplied by the ratio of the scales.
    """
    fitted = dict(tensors)
    for path, module in model.named_modules():
        if isinstance(module, UniformHeadAttention):
            fitted |= _fitted_queries(module, fitted, f"{path}.", descriptions.get(path, {}))
    return fitted


def _fitted_queries(
    layer: UniformHeadAttention, tensors: Mapping[str, Tensor], prefix: str, saved: Mapping[str, str]
) -> dict[str, Tensor]:
    names = [name for name in (f"{prefix}qk.weight", f"{prefix}qk.bias") if name in tensors]
    if not saved or "scale" in saved:
        return {}
    halves = {name: tensors[name].chunk(2) for name in names}
    return {name: torch.cat((queries * layer.query_factor, keys)) for name, (queries, keys) in halves.items()}


def _fit_saved_scale(layer: Any, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *_: Any) -> None:
    """Fits weights that `load_state_dict` loads, with the description in their metadata."""
    state_dict.update(_fitted_queries(layer, state_dict, prefix, local_metadata.get(METADATA, {})))
