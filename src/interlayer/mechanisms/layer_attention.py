"""What all variants of layer attention share: projections, norms, stochastic depth and the sum with x.

See `mrla.py` for the equations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from timm.layers import DropPath
from torch import Tensor, nn

from .. import ops
from .description import record_description
from .modules import member
from .options import Init, Reading, expect_choice
from .protocol import BlockMechanism, BlockValues, MemoryScope, Place, TokenGrid

Style = Literal["cnn", "transformer"]
Projection = Literal["conv1d", "linear"]
Readings = Mapping[str, Mapping[str, Any]]

LINEAR_REDUCTION = 16  # Table 4 (d): fully connected q and k map C to C / 16 channels


def adaptive_kernel_size(channels: int) -> int:
    """Returns the kernel size of the Conv1d for q and k: the odd number nearest (log2(C) + 1) / 2, as in ECA-Net."""
    size = int(abs((math.log2(channels) + 1) / 2))
    return size if size % 2 else size + 1


class LayerAttention(BlockMechanism):
    """Base class of the variants: projections, norms, stochastic depth and the sum with x.

    Args:
        channels: C, the number of channels of the block's output.
        style: "cnn" (the output is normalized) or "transformer" (the input is normalized).
        channels_per_head: must divide `channels`. The paper uses 32 in ResNets, 8 in EfficientNets, 16 in transformers.
        projection: "conv1d", or "linear" for fully connected q and k of C / 16 channels (Table 4 d).
        value_conv: False for V = x (Table 4 c).
        attention: False keeps only the depthwise convolution and the norm, O = V, without q, k and memory (Table 4 g).
        cross_layer: False cuts the memory: every layer attends to itself alone. The modules, their parameters and
            initial values are the same, so this is the control of what reading other layers contributes.
        norm_layer: the norm of the "cnn" style.
        drop_path: probability that a sample skips the attention during training.
        shared_drop_path: whether samples skip the attention where the block dropped its residual branch, with
            probability `drop_path`, instead of a draw of their own (appendices B.1.1 and B.4).
        add_prefix: whether the normalized prefix tokens of a transformer are added to the prefix tokens. Default: set
            by the reading.
        reading: "paper", or "published" for what the authors' program computes.
        init: "paper", or "identity" to start with x' = x, which preserves the function of a trained network.
    """

    READINGS: ClassVar[Readings] = {"paper": {}}  # options in which the readings differ
    reads_map = True
    attends_to = "layers"  # not to tokens: its scores are no spatial attention

    def __init__(
        self,
        channels: int,
        *,
        style: Style = "cnn",
        channels_per_head: int = 32,
        projection: Projection = "conv1d",
        value_conv: bool = True,
        attention: bool = True,
        cross_layer: bool = True,
        norm_layer: Callable[[int], nn.Module] = nn.BatchNorm2d,
        drop_path: float = 0.0,
        shared_drop_path: bool = False,
        add_prefix: bool | None = None,
        reading: Reading = "paper",
        init: Init = "paper",
    ) -> None:
        super().__init__()
        expect_choice("style", style, ("cnn", "transformer"))
        expect_choice("projection", projection, ("conv1d", "linear"))
        expect_choice("init", init, ("paper", "identity"))
        if reading not in self.READINGS:
            raise ValueError(
                f"{type(self).__name__} has reading={' or '.join(map(repr, self.READINGS))}, got {reading!r}"
            )
        if channels_per_head < 1 or channels % channels_per_head:
            raise ValueError(f"expected channels divisible by channels_per_head={channels_per_head}, got {channels}")
        if projection == "linear" and channels_per_head % LINEAR_REDUCTION:
            raise ValueError(
                f"projection='linear' needs channels_per_head divisible by {LINEAR_REDUCTION}, got {channels_per_head}"
            )
        if not attention and projection != "conv1d":
            raise ValueError("attention=False leaves out q and k, so projection means nothing")
        if not attention and not value_conv:
            raise ValueError("attention=False leaves the depthwise convolution alone, so value_conv must be True")
        if not attention and not cross_layer:
            raise ValueError("attention=False reads no other layer, so cross_layer=False means nothing")
        self.channels = channels
        self.heads = channels // channels_per_head
        self.style = style
        self.reading = reading
        self.add_prefix = self._resolve("add_prefix", add_prefix, False)
        self.projection = projection
        self.attention = attention
        self.cross_layer = cross_layer
        self.memory_scope: MemoryScope = "stage" if attention and cross_layer else "none"
        self.layer = 0  # index of the layer in its stage; set by the host and saved with the weights

        if projection == "linear":
            self.query: nn.Linear | nn.Conv1d = nn.Linear(channels, channels // LINEAR_REDUCTION, bias=False)
            self.key: nn.Linear | nn.Conv1d = nn.Linear(channels, channels // LINEAR_REDUCTION, bias=False)
        else:
            size = adaptive_kernel_size(channels)
            self.query = nn.Conv1d(1, 1, size, padding=size // 2, bias=False)
            self.key = nn.Conv1d(1, 1, size, padding=size // 2, bias=False)
        if not attention:
            del self.query, self.key
        self.value = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False) if value_conv else None
        self.norm_in = nn.LayerNorm(channels, eps=1e-6) if style == "transformer" else None
        self.norm = norm_layer(channels) if style == "cnn" else None
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.reads_branch_factor = shared_drop_path and drop_path > 0
        self.scores = nn.Identity()  # receives the attention weights, [B, heads, t], for forward hooks

        record_description(self)
        if init == "identity":
            self._start_as_identity()

    def _resolve(self, name: str, given: Any, default: Any) -> Any:
        """Returns the value of an option: the given one, or that of the reading."""
        return self.READINGS[self.reading].get(name, default) if given is None else given

    def leave(self, output: Tensor, values: BlockValues, memory: Any, place: Place) -> tuple[Tensor, Any]:
        layout, grid, shortcut = values.layout, values.grid, values.shortcut
        assert layout is not None
        if values.open_end is not None:
            feature_map, memory, _ = self(output, memory, shortcut, None, values.branch_factor, values.open_end)
            return feature_map, memory
        if not self.reads_shortcut or (shortcut is not None and shortcut.shape != output.shape):
            shortcut = None
        as_tokens = layout.to_tokens(output, grid) if self.takes_tokens() else None
        if as_tokens is not None:
            tokens, token_grid = as_tokens
            as_tokens = None if shortcut is None else layout.to_tokens(shortcut, grid)
            shortcut = None if as_tokens is None else as_tokens[0]
            tokens, memory, _ = self(tokens, memory, shortcut, None, values.branch_factor, None, token_grid)
            return layout.from_tokens(tokens, token_grid), memory
        feature_map, prefix = layout.to_map(output, grid)
        if shortcut is not None:
            shortcut, _ = layout.to_map(shortcut, grid)
        feature_map, memory, prefix = self(feature_map, memory, shortcut, prefix, values.branch_factor)
        return layout.from_map(feature_map, prefix), memory

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Any = None,
        shortcut: Tensor | None = None,
        prefix: Tensor | None = None,
        branch_factor: Tensor | None = None,
        end: ops.BlockEnd | None = None,
        token_grid: TokenGrid | None = None,
    ) -> tuple[Tensor, Any, Tensor | None]:
        """
        Args:
            x: the block's output, [B, C, H, W], or tokens [B, P + H W, C] if `token_grid` is given.
            memory: the memory of the previous layer, or None in the first layer of a stage.
            shortcut: the shortcut of the block, used if `reads_shortcut` is set.
            prefix: the prefix tokens of a transformer, [B, P, C], which are changed if `add_prefix` is set.
            branch_factor: the factor of each sample's residual branch, [B], used if `shared_drop_path` is set.
            end: the end of the block, if it is computed here; x is then the output of its last convolution.
            token_grid: the grid of the tokens, if x and the shortcut are tokens (see `takes_tokens`).

        Returns:
            x', the memory for the next layer, and the prefix tokens.
        """
        if x.shape[1 if token_grid is None else 2] != self.channels:
            kind = "a map" if token_grid is None else "tokens"
            raise ValueError(f"expected {kind} of {self.channels} channels, got {tuple(x.shape)}")
        mask = branch_factor if self.reads_branch_factor else self._drop_path_mask(x)
        if not self.cross_layer:
            memory = None
        if token_grid is not None:
            x, memory = self.run_tokens(x, memory, shortcut, mask, token_grid)
            return x, memory if self.cross_layer else None, None
        if self.is_one_operation():
            x, memory = self.run_layer(x, memory, shortcut, mask, end)
            return x, memory if self.cross_layer else None, prefix
        output, memory = self.attend(layer_norm_of_map(self.norm_in, x), memory, shortcut)
        if self.norm is not None:
            output = self.norm(output)
        if prefix is not None and self.add_prefix and self.norm_in is not None:
            prefix = ops.masked_sum(prefix, self.norm_in(prefix), mask)
        return ops.masked_sum(x, self.activate(output), mask), memory if self.cross_layer else None, prefix

    def _drop_path_mask(self, x: Tensor) -> Tensor | None:
        """Returns the factor of each sample's attention, [B]: 0, or 1 / (1 - rate). None if nothing is dropped."""
        rate = getattr(member(self, "drop_path"), "drop_prob", 0.0) if self.training else 0.0
        if not rate:
            return None
        return x.new_empty(x.shape[0]).bernoulli_(1 - rate).div_(1 - rate)

    def is_one_operation(self) -> bool:
        """Returns whether `run_layer` computes the layer: attention, norm and sum in one operation."""
        return False

    def run_layer(
        self, x: Tensor, memory: Any, shortcut: Tensor | None, mask: Tensor | None, end: ops.BlockEnd | None
    ) -> tuple[Tensor, Any]:
        """Returns x' and the memory for the next layer."""
        raise NotImplementedError

    def takes_tokens(self) -> bool:
        """Returns whether `run_tokens` computes the layer of a transformer: norms, attention and sum in one operation.

        The memory is the same as without it, so that a stage can contain layers of both kinds.
        """
        return False

    def run_tokens(
        self, x: Tensor, memory: Any, shortcut: Tensor | None, mask: Tensor | None, grid: TokenGrid
    ) -> tuple[Tensor, Any]:
        """Returns x', [B, P + H W, C], and the memory for the next layer. The shortcut consists of tokens like x."""
        raise NotImplementedError

    def attend(self, x: Tensor, memory: Any, shortcut: Tensor | None) -> tuple[Tensor, Any]:
        """Returns O and the memory for the next layer, given the map x, which is normalized in a transformer."""
        raise NotImplementedError

    def activate(self, output: Tensor) -> Tensor:
        return output

    def project(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """Returns queries and keys, [N, D] each, of N averaged maps [N, C]."""
        if self.projection == "linear":
            return self.query(pooled), self.key(pooled)
        return ops.channel_projections(pooled, *self.projection_weights())

    def queries_and_keys(
        self, x: Tensor, *, end: ops.BlockEnd | None = None, token_grid: TokenGrid | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the queries and keys, [B, heads, D / heads] each, that `forward` computes from the same arguments.

        The layer has to be in eval mode: the norm at the end of a block would update its statistics in training.
        """
        if end is not None:
            x = ops.block_output(x, end)
        if token_grid is not None:
            x = ops.tokens_to_map(x[:, token_grid.prefix :], token_grid[:2])
        query, key = self.project(layer_norm_of_map(self.norm_in, x).mean((2, 3)))
        return query.unflatten(-1, (self.heads, -1)), key.unflatten(-1, (self.heads, -1))

    def projection_weights(self) -> tuple[Tensor, Tensor]:
        """Returns the weights of the convolutions for q and k."""
        return member(member(self, "query"), "weight"), member(member(self, "key"), "weight")

    @property
    def value_weight(self) -> Tensor | None:
        value = member(self, "value")
        return None if value is None else member(value, "weight")

    def report_scores(self, scores: Tensor) -> None:
        """Passes the attention weights, [B, heads] or [B, heads, t], to the forward hooks of `scores`."""
        hooked = member(self, "scores")
        if hooked._forward_hooks or hooked._forward_pre_hooks:  # a call takes longer than a small kernel
            hooked(scores[..., None] if scores.dim() == 2 else scores)

    def describe(self) -> dict[str, str]:
        """Returns the properties that the tensors do not determine, although they change the computed function."""
        return {
            "mechanism": type(self).__name__,
            "reading": self.reading,
            "channels_per_head": str(self.channels // self.heads),
            "cross_layer": str(self.cross_layer),
            "layer": str(self.layer),
        }

    def _start_as_identity(self) -> None:
        """Initialize O (or its norm) to zero, with gradients that are not zero."""
        zeroed = self.norm or self.value
        if self.norm_in is not None and (self.value is None or self.add_prefix):
            zeroed = self.norm_in  # the values, and the prefix tokens that are added, are computed from its output
        assert zeroed is not None
        for parameter in zeroed.parameters():
            nn.init.zeros_(parameter)

    def extra_repr(self) -> str:
        return f"channels={self.channels}, heads={self.heads}, style={self.style!r}, reading={self.reading!r}"


def layer_norm_of_map(norm: nn.Module | None, x: Tensor) -> Tensor:
    """Apply a LayerNorm over the channels of a [B, C, H, W] map. Returns x if there is no norm."""
    return x if norm is None else norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
