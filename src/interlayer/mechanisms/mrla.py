"""Layer attention: a layer attends to the previous layers of its stage.

Paper: Cross-Layer Retrospective Retrieving via Layer Attention (MRLA), Fang et al., ICLR 2023,
https://openreview.net/forum?id=pvgEL1yS3Ql, sections 3 and 4, appendix A.

Let x [B, C, H, W] be the output of a block, the t-th of its stage. Every variant computes

    y = global average of x                        [B, C]
    q = f_Q(y), k = f_K(y)                         [B, D], a Conv1d over the channels each
    V = f_V(x)                                     [B, C, H, W], a 3x3 depthwise convolution
    O = attention of q over the keys and values of the variant, computed per head
    x' = x + drop_path(norm(O))

and differs in the definition of O:

    MRLALight   O_t = sigmoid(q_t · k_t / sqrt(d)) V_t + lambda_t ⊙ O_{t-1}                    Eq. 8, Algorithms 3, 4
    MRLABase    O_t = sum over s <= t of softmax_s(q_t · k_s / sqrt(d)) V_s                    Eq. 6, Algorithms 1, 2
    MLA         MRLABase with k_s and V_s derived by layer t: f_K^t(x_s), f_V^t(x_s)           Eq. 4
    MRLALinear  MRLABase with the kernel φ(q) · φ(k), φ = elu + 1, instead of exp              appendix A.3

CRLA (Table 4 f) is MRLALight with one channel per head. The ablations of Table 4 are options.

There are two styles. In a CNN, O is normalized by a BatchNorm2d. In a transformer, x is normalized by a LayerNorm and O
is not normalized; MRLALight also normalizes O_{t-1} and applies GELU to V. Prefix tokens (class, distillation, register
tokens) are excluded: the network passes the grid of patch tokens as a map.

The text is not explicit on two points. Algorithms 1 to 4 return O_t as the output of the block. The norm and the sum
with x are kept here, because the network would have no residual path without the sum. Lambda is initialized from a
standard normal distribution, as in the authors' program.

A reading is a row of options (`READINGS`). `reading="published"` computes what the authors' program computes where it
differs from the text (docs/deviations.md lists every difference): MRLALight uses the shortcut of the block as O_{t-1};
MRLABase has a ReLU between norm and sum in a CNN; in a transformer the normalized prefix tokens are added to the prefix
tokens. MLA and MRLALinear have no published reading.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from .. import ops
from .description import record_description
from .options import Init, Reading, expect_choice
from .protocol import BlockMechanism, BlockValues, MemoryScope, Place

Style = Literal["cnn", "transformer"]
Projection = Literal["conv1d", "linear"]
Previous = Literal["attention", "shortcut"]
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

    def __init__(
        self,
        channels: int,
        *,
        style: Style = "cnn",
        channels_per_head: int = 32,
        projection: Projection = "conv1d",
        value_conv: bool = True,
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
        self.channels = channels
        self.heads = channels // channels_per_head
        self.style = style
        self.reading = reading
        self.add_prefix = self._resolve("add_prefix", add_prefix, False)
        self.projection = projection
        self.layer = 0  # index of the layer in its stage; set by the host and saved with the weights

        if projection == "linear":
            self.query: nn.Linear | nn.Conv1d = nn.Linear(channels, channels // LINEAR_REDUCTION, bias=False)
            self.key: nn.Linear | nn.Conv1d = nn.Linear(channels, channels // LINEAR_REDUCTION, bias=False)
        else:
            size = adaptive_kernel_size(channels)
            self.query = nn.Conv1d(1, 1, size, padding=size // 2, bias=False)
            self.key = nn.Conv1d(1, 1, size, padding=size // 2, bias=False)
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
        feature_map, prefix = layout.to_map(output, grid)
        if shortcut is not None and self.reads_shortcut and shortcut.shape == output.shape:
            shortcut, _ = layout.to_map(shortcut, grid)
        else:
            shortcut = None
        feature_map, memory, prefix = self(feature_map, memory, shortcut, prefix, values.branch_factor)
        return layout.from_map(feature_map, prefix), memory

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Any = None,
        shortcut: Tensor | None = None,
        prefix: Tensor | None = None,
        branch_factor: Tensor | None = None,
    ) -> tuple[Tensor, Any, Tensor | None]:
        """
        Args:
            x: the block's output, [B, C, H, W].
            memory: the memory of the previous layer, or None in the first layer of a stage.
            shortcut: the shortcut of the block, used if `reads_shortcut` is set.
            prefix: the prefix tokens of a transformer, [B, P, C], which are changed if `add_prefix` is set.
            branch_factor: the factor of each sample's residual branch, [B], used if `shared_drop_path` is set.

        Returns:
            x', the memory for the next layer, and the prefix tokens.
        """
        if x.shape[1] != self.channels:
            raise ValueError(f"expected a map of {self.channels} channels, got {tuple(x.shape)}")
        output, memory = self.attend(_layer_norm(self.norm_in, x), memory, shortcut)
        if self.norm is not None:
            output = self.norm(output)
        mask = branch_factor if self.reads_branch_factor else self._drop_path_mask(x)
        if prefix is not None and self.add_prefix and self.norm_in is not None:
            prefix = _masked_sum(prefix, self.norm_in(prefix), mask)
        return _masked_sum(x, self.activate(output), mask), memory, prefix

    def _drop_path_mask(self, x: Tensor) -> Tensor | None:
        """Returns the factor of each sample's attention, [B]: 0, or 1 / (1 - rate). None if nothing is dropped."""
        rate = getattr(self.drop_path, "drop_prob", 0.0)
        if not self.training or not rate:
            return None
        return x.new_empty(x.shape[0]).bernoulli_(1 - rate).div_(1 - rate)

    def attend(self, x: Tensor, memory: Any, shortcut: Tensor | None) -> tuple[Tensor, Any]:
        """Returns O and the memory for the next layer, given the map x, which is normalized in a transformer."""
        raise NotImplementedError

    def activate(self, output: Tensor) -> Tensor:
        return output

    def project(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """Returns queries and keys, [N, D] each, of N averaged maps [N, C]."""
        if self.projection == "linear":
            return self.query(pooled), self.key(pooled)
        weight = torch.cat((self.query.weight, self.key.weight))  # one convolution for both
        query, key = F.conv1d(pooled[:, None], weight, padding=weight.shape[-1] // 2).unbind(1)
        return query, key

    @property
    def value_weight(self) -> Tensor | None:
        return None if self.value is None else self.value.weight

    def describe(self) -> dict[str, str]:
        """Returns the properties that the tensors do not determine, although they change the computed function."""
        return {
            "mechanism": type(self).__name__,
            "reading": self.reading,
            "channels_per_head": str(self.channels // self.heads),
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


class MRLALight(LayerAttention):
    """MRLA-light: O_t = sigmoid(q_t · k_t / sqrt(d)) V_t + lambda_t ⊙ O_{t-1} (Eq. 8 and 9).

    In the paper's reading O_{t-1} is the attention output of the previous layer, and zero in the first layer of a
    stage. In the published reading it is the shortcut of the block: its input, projected if the block has a projection.

    Args:
        memory: False omits lambda ⊙ O_{t-1} (Table 4 b).
        learn_decay: False fixes lambda to one (Table 4 e).
        attention: False keeps only the depthwise convolution and the norm, without q, k and memory (Table 4 g).
        previous: O_{t-1}: the "attention" of the previous layer or the "shortcut" of the block. Default: set by the
            reading.
    """

    READINGS: ClassVar[Readings] = {"paper": {}, "published": {"previous": "shortcut", "add_prefix": True}}

    def __init__(
        self,
        channels: int,
        *,
        memory: bool = True,
        learn_decay: bool = True,
        attention: bool = True,
        previous: Previous | None = None,
        init: Init = "paper",
        **shared: Any,
    ) -> None:
        super().__init__(channels, init=init, **shared)
        previous = self._resolve("previous", previous, "attention")
        expect_choice("previous", previous, ("attention", "shortcut"))
        if not attention and (self.projection != "conv1d" or not learn_decay):
            raise ValueError("attention=False leaves out q, k and lambda, so projection and learn_decay mean nothing")
        if not memory and not learn_decay:
            raise ValueError("learn_decay=False fixes lambda, which memory=False leaves out: give one of them")
        self.attention = attention
        self.memory = memory and attention
        self.reads_shortcut = self.memory and previous == "shortcut"
        self.memory_scope: MemoryScope = "stage" if self.memory and not self.reads_shortcut else "none"
        if not attention:
            if self.value is None:
                raise ValueError("attention=False leaves the depthwise convolution alone, so value_conv must be True")
            del self.query, self.key
        self.decay = nn.Parameter(torch.randn(channels)) if self.memory and learn_decay else None
        self.norm_previous = nn.LayerNorm(channels, eps=1e-6) if self.memory and self.style == "transformer" else None
        if init == "identity" and self.norm_previous is not None:
            for parameter in [self.decay] if self.decay is not None else self.norm_previous.parameters():
                nn.init.zeros_(parameter)

    def describe(self) -> dict[str, str]:
        return {**super().describe(), "memory": str(self.memory)}

    def attend(self, x: Tensor, memory: Any, shortcut: Tensor | None) -> tuple[Tensor, Any]:
        gelu = self.style == "transformer"
        if not self.attention:
            return ops.depthwise_value(x, self.value_weight, gelu=gelu), None
        query, key = self.project(x.mean((2, 3)))
        previous = self._previous(x, shortcut if self.reads_shortcut else memory) if self.memory else None
        output, gate = ops.light_attention(
            x, query, key, self.value_weight, previous, self.decay, heads=self.heads, gelu=gelu
        )
        self.scores(gate[..., None])
        return output, (output if self.memory and not self.reads_shortcut else None)

    def _previous(self, x: Tensor, previous: Tensor | None) -> Tensor:
        if previous is not None:
            return _layer_norm(self.norm_previous, previous)
        # O_0 = 0. The term is multiplied by zero, not skipped: DDP expects a gradient for every parameter.
        return 0 * _layer_norm(self.norm_previous, x.new_zeros(1, self.channels, 1, 1))


class MRLABase(LayerAttention):
    """MRLA-base: O_t = sum over s <= t of softmax_s(q_t · k_s / sqrt(d)) V_s (Eq. 6 and 9).

    The memory contains the keys and values of the stage so far. They are passed on without copies, so a stage of t
    layers saves t maps for the backward pass.

    Args:
        relu: whether a ReLU is applied between the norm and the sum in a CNN. Default: set by the reading.
    """

    READINGS: ClassVar[Readings] = {"paper": {}, "published": {"relu": True, "add_prefix": True}}
    weighting: ClassVar[Literal["softmax", "linear"]] = "softmax"

    def __init__(self, channels: int, *, relu: bool | None = None, init: Init = "paper", **shared: Any) -> None:
        super().__init__(channels, init="paper", **shared)
        self.relu = self._resolve("relu", relu, False) and self.style == "cnn"
        if init == "identity" and self.relu:
            raise ValueError(
                "init='identity' cannot train the published MRLABase: its ReLU has no gradient where the norm is zero; "
                "use reading='paper' or init='paper'"
            )
        if init == "identity":
            self._start_as_identity()
        expect_choice("init", init, ("paper", "identity"))

    def attend(self, x: Tensor, memory: Any, shortcut: Tensor | None) -> tuple[Tensor, Any]:
        query, key = self.project(x.mean((2, 3)))
        keys, values = memory if memory is not None else ((), ())
        keys = (*keys, key)
        output, weights, value = ops.layer_attention(
            query, keys, values, (x,), self.value_weight, heads=self.heads, weighting=self.weighting
        )
        self.scores(weights)
        return output, (keys, (*values, *value))

    def activate(self, output: Tensor) -> Tensor:
        return F.relu(output) if self.relu else output


class MRLALinear(MRLABase):
    """MRLA with the kernel φ(q) · φ(k), φ = elu + 1, in place of exp(q · k / sqrt(d)) (appendix A.3).

    Args:
        constant_memory: pass on the sums U and Z of the paper instead of the layers. The result is the same. U has one
            map per key channel of a head, so this saves memory only in stages of more layers than a head has channels.
    """

    READINGS: ClassVar[Readings] = {"paper": {}}
    weighting = "linear"

    def __init__(self, channels: int, *, constant_memory: bool = False, **shared: Any) -> None:
        super().__init__(channels, **shared)
        self.constant_memory = constant_memory

    def attend(self, x: Tensor, memory: Any, shortcut: Tensor | None) -> tuple[Tensor, Any]:
        if not self.constant_memory:
            return super().attend(x, memory, shortcut)
        query, key = self.project(x.mean((2, 3)))
        return ops.linear_recurrence(x, query, key, self.value_weight, memory, heads=self.heads)


class MLA(LayerAttention):
    """Multi-head layer attention: every layer derives the keys and values of all previous layers itself (Eq. 4).

    The memory contains the maps of the previous layers (in a transformer, each normalized by its own layer) and their
    averages. The published program mixes layers with heads by a reshape without a transposition, which is not
    reproduced.
    """

    def attend(self, x: Tensor, memory: Any, shortcut: Tensor | None) -> tuple[Tensor, Any]:
        maps, pooled = memory if memory is not None else ((), ())
        maps, pooled = (*maps, x), (*pooled, x.mean((2, 3)))
        queries, keys = self.project(torch.cat(pooled))
        layers = len(maps)
        output, weights, _ = ops.layer_attention(
            queries.chunk(layers)[-1], keys.chunk(layers), (), maps, self.value_weight, heads=self.heads
        )
        self.scores(weights)
        return output, (maps, pooled)


def _masked_sum(x: Tensor, output: Tensor, mask: Tensor | None) -> Tensor:
    """Returns x + mask * output, or x + output if there is no mask."""
    if mask is None:
        return x + output
    return torch.addcmul(x, output.to(x.dtype), mask.to(x.dtype).reshape(-1, *(1,) * (x.dim() - 1)))


def _layer_norm(norm: nn.Module | None, x: Tensor) -> Tensor:
    """Apply a LayerNorm over the channels of a [B, C, H, W] map. Returns x if there is no norm."""
    return x if norm is None else norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
