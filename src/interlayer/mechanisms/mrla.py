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

Two options make controls, networks that tell what reading other layers contributes. `cross_layer=False` cuts the memory
and keeps every module: O_t = sigmoid(q_t · k_t / sqrt(d)) V_t in MRLALight, where lambda is multiplied by zero, and
O_t = V_t in the others, whose softmax over a single layer is one. `attention=False` is the depthwise convolution alone,
O_t = V_t, without the parameters of q, k and lambda. MRLALight computes the same with `memory=False` (Table 4 b) and
with `cross_layer=False`, but without lambda its other parameters start from other random numbers.

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

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from .batch_norm import norm_arguments, norm_unsupported_reason
from .layer_attention import LayerAttention, Readings, layer_norm_of_map
from .layer_norm import layer_norm_arguments, layer_norm_unsupported_reason
from .modules import member
from .options import Init, expect_choice
from .protocol import TokenGrid

Previous = Literal["attention", "shortcut"]


class MRLALight(LayerAttention):
    """MRLA-light: O_t = sigmoid(q_t · k_t / sqrt(d)) V_t + lambda_t ⊙ O_{t-1} (Eq. 8 and 9).

    In the paper's reading O_{t-1} is the attention output of the previous layer, and zero in the first layer of a
    stage. In the published reading it is the shortcut of the block: its input, projected if the block has a projection.

    Args:
        memory: False omits lambda ⊙ O_{t-1} (Table 4 b).
        learn_decay: False fixes lambda to one (Table 4 e).
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
        previous: Previous | None = None,
        init: Init = "paper",
        **shared: Any,
    ) -> None:
        super().__init__(channels, init=init, **shared)
        previous = self._resolve("previous", previous, "attention")
        expect_choice("previous", previous, ("attention", "shortcut"))
        if not self.attention and not learn_decay:
            raise ValueError("attention=False leaves out lambda, so learn_decay means nothing")
        if not memory and not learn_decay:
            raise ValueError("learn_decay=False fixes lambda, which memory=False leaves out: give one of them")
        if not memory and not self.cross_layer:
            raise ValueError("memory=False reads no other layer, so cross_layer=False means nothing")
        self.memory = memory and self.attention
        self.reads_shortcut = self.memory and self.cross_layer and previous == "shortcut"
        if not self.memory or self.reads_shortcut:
            self.memory_scope = "none"
        self.decay = nn.Parameter(torch.randn(channels)) if self.memory and learn_decay else None
        self.norm_previous = nn.LayerNorm(channels, eps=1e-6) if self.memory and self.style == "transformer" else None
        if init == "identity" and self.norm_previous is not None:
            for parameter in [self.decay] if self.decay is not None else self.norm_previous.parameters():
                nn.init.zeros_(parameter)

    def describe(self) -> dict[str, str]:
        return {**super().describe(), "memory": str(self.memory)}

    def is_one_operation(self) -> bool:
        convolutions = self.projection == "conv1d" and member(self, "value") is not None
        return convolutions and norm_unsupported_reason(member(self, "norm")) is None

    def ends_block(self, x: Tensor) -> bool:
        return self.is_one_operation() and ops.supports_open_end(x)

    def run_layer(
        self, x: Tensor, memory: Any, shortcut: Tensor | None, mask: Tensor | None, end: ops.BlockEnd | None
    ) -> tuple[Tensor, Any]:
        query, key, previous = self._operands(memory, shortcut)
        x, output, gate = ops.light_layer(
            x, query, key, self.value_weight, previous, member(self, "decay"), norm_arguments(member(self, "norm")),
            mask, heads=self.heads, end=end,
        )  # fmt: skip
        return x, self._pass_on(output, gate)

    def takes_tokens(self) -> bool:
        norm, norm_previous = member(self, "norm_in"), member(self, "norm_previous")
        norms = [norm] if norm_previous is None else [norm, norm_previous]
        return (
            self.projection == "conv1d"
            and member(self, "value") is not None
            and all(layer_norm_unsupported_reason(norm) is None for norm in norms)
        )

    def run_tokens(
        self, x: Tensor, memory: Any, shortcut: Tensor | None, mask: Tensor | None, grid: TokenGrid
    ) -> tuple[Tensor, Any]:
        query, key, previous = self._operands(memory, shortcut)
        norm, previous_norm = layer_norm_arguments(member(self, "norm_in")), member(self, "norm_previous")
        norm_previous = None if previous_norm is None else layer_norm_arguments(previous_norm)
        x, output, gate = ops.light_tokens(
            x, query, key, self.value_weight, previous, member(self, "decay"), norm, norm_previous,
            mask, heads=self.heads, grid=grid[:2], prefix=grid.prefix, add_prefix=self.add_prefix,
        )  # fmt: skip
        return x, self._pass_on(output, gate)

    def _operands(self, memory: Any, shortcut: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the weights for q and k, and O_{t-1}."""
        query, key = self.projection_weights() if self.attention else (None, None)
        return query, key, (shortcut if self.reads_shortcut else memory) if self.memory else None

    def _pass_on(self, output: Tensor, gate: Tensor | None) -> Tensor | None:
        """Returns the memory for the next layer."""
        if gate is not None:
            self.report_scores(gate)
        return output if self.memory and not self.reads_shortcut else None

    def attend(self, x: Tensor, memory: Any, shortcut: Tensor | None) -> tuple[Tensor, Any]:
        gelu = self.style == "transformer"
        if not self.attention:
            return ops.depthwise_value(x, self.value_weight, gelu=gelu), None
        query, key = self.project(x.mean((2, 3)))
        previous = self._previous(x, shortcut if self.reads_shortcut else memory) if self.memory else None
        output, gate = ops.light_attention(
            x, query, key, self.value_weight, previous, self.decay, heads=self.heads, gelu=gelu
        )
        return output, self._pass_on(output, gate)

    def _previous(self, x: Tensor, previous: Tensor | None) -> Tensor:
        if previous is not None:
            return layer_norm_of_map(self.norm_previous, previous)
        # O_0 = 0. The term is multiplied by zero, not skipped: DDP expects a gradient for every parameter.
        return 0 * layer_norm_of_map(self.norm_previous, x.new_zeros(1, self.channels, 1, 1))


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

    def is_one_operation(self) -> bool:
        convolutions = self.projection == "conv1d" and member(self, "value") is not None
        one = self.weighting == "softmax" and convolutions if self.attention else not self.relu
        return one and norm_unsupported_reason(member(self, "norm")) is None

    def ends_block(self, x: Tensor) -> bool:
        return self.is_one_operation() and ops.supports_open_end(x)

    def run_layer(
        self, x: Tensor, memory: Any, shortcut: Tensor | None, mask: Tensor | None, end: ops.BlockEnd | None
    ) -> tuple[Tensor, Any]:
        if not self.attention:
            assert self.value_weight is not None
            return ops.light_layer(
                x, None, None, self.value_weight, None, None, norm_arguments(self.norm), mask, heads=self.heads, end=end
            )[0], None
        keys, values = memory if memory is not None else ((), ())
        x, weights, keys, values = ops.base_layer(
            x, *self.projection_weights(), self.value_weight, keys, values, norm_arguments(member(self, "norm")),
            mask, heads=self.heads, relu=self.relu, end=end,
        )  # fmt: skip
        self.report_scores(weights)
        return x, (keys, values)

    def takes_tokens(self) -> bool:
        convolutions = self.projection == "conv1d" and member(self, "value") is not None
        one = self.weighting == "softmax" and convolutions and self.attention
        return one and layer_norm_unsupported_reason(member(self, "norm_in")) is None

    def run_tokens(
        self, x: Tensor, memory: Any, shortcut: Tensor | None, mask: Tensor | None, grid: TokenGrid
    ) -> tuple[Tensor, Any]:
        keys, values = memory if memory is not None else ((), ())
        x, weights, keys, values = ops.base_tokens(
            x, *self.projection_weights(), self.value_weight, keys, values,
            layer_norm_arguments(member(self, "norm_in")), mask, heads=self.heads, grid=grid[:2], prefix=grid.prefix,
            add_prefix=self.add_prefix,
        )  # fmt: skip
        self.report_scores(weights)
        return x, (keys, values)

    def attend(self, x: Tensor, memory: Any, shortcut: Tensor | None) -> tuple[Tensor, Any]:
        if not self.attention:
            return ops.depthwise_value(x, self.value_weight), None
        query, key = self.project(x.mean((2, 3)))
        keys, values = map(ops.tensors_of, memory) if memory is not None else ((), ())
        keys = (*keys, key)
        output, weights, value = ops.layer_attention(
            query, keys, values, (x,), self.value_weight, heads=self.heads, weighting=self.weighting
        )
        self.report_scores(weights)
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
        if not self.constant_memory or not self.attention:
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
        if not self.attention:
            return ops.depthwise_value(x, self.value_weight), None
        maps, pooled = memory if memory is not None else ((), ())
        maps, pooled = (*maps, x), (*pooled, x.mean((2, 3)))
        queries, keys = self.project(torch.cat(pooled))
        layers = len(maps)
        output, weights, _ = ops.layer_attention(
            queries.chunk(layers)[-1], keys.chunk(layers), (), maps, self.value_weight, heads=self.heads
        )
        self.report_scores(weights)
        return output, (maps, pooled)
