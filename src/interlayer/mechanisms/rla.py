"""Recurrent layer aggregation: a recurrent state that every block reads and updates.

Paper: Recurrence along Depth: Deep Convolutional Neural Networks with Recurrent Layer Aggregation, NeurIPS 2021,
section 3.3, Figures 3, 4, 6 and 7. A residual block has an input x, a branch y, a shortcut s and an output
x' = act(y + s). The state h of k channels is passed along with x from the first block to the classifier:

    y  = f([x, h])                       the block reads the state with its input
    h' = g2(tanh(BN(h + g1(y))))         g1: 1x1 from C to k channels, g2: 3x3 from k to k, BN: one per block

The blocks of a stage share g1 and g2. h is zero before the first block and average-pooled 2x2 where a block strides.
After the last block it is normalized, activated and concatenated with x for the classifier.

A convolution of a concatenation is computed as the sum of two convolutions, f([x, h]) = f_x(x) + f_h(h). The block
keeps its own convolution f_x. The convolutions f_h are the `exchanges` of this module.

    x, y, s, x'   [B, C, H, W]
    h             [B, k, H, W]; with an LSTM cell also c of the same shape

`cross_layer=False` is a control: h is multiplied by zero at the start of every block, so that no block reads another
and the classifier reads the state of the last block alone, with the same modules, parameters and initial values.

Deviations: none. For an odd height or width the pooled state keeps the last row and column, like a strided convolution
with padding. The published program does not support such sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .description import record_description
from .options import Init, Reading, expect_choice
from .protocol import BlockMechanism, BlockValues, MemoryScope, Place
from .recurrent_cells import ConvGRU, ConvLSTM, GateActivation

Insert = Literal["branch", "output", "shortcut"]
Joins = Literal["before", "after"]
Cell = Literal["preact", "postact", "convlstm", "convgru"]
Activation = Literal["tanh", "relu", "none"]
GATED = ("convlstm", "convgru")  # cells with gates

# The integration strategies of Figure 4 and the cells of Figures 6 and 7, by the names of Tables 6 and 11.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "v1": {},
    "v2": {"joins": "after"},
    "v3": {"insert": "output"},
    "v4": {"insert": "output", "joins": "after"},
    "v5": {"insert": "shortcut"},
    "v6": {"insert": "shortcut", "joins": "after"},
    "postact": {"cell": "postact"},
    "convlstm": {"cell": "convlstm"},
    "convgru": {"cell": "convgru"},
    "unshared": {"shared": False},
    "no_exchange": {"exchange": False},
}
# Options in which the authors' programs differ from the text, by the kind of network and cell (see docs/deviations.md).
# Their ResNets add the shortcut in place, so g1 reads the output x' instead of the branch y.
_PLAIN_HEAD = {"head_norm": False, "head_activation": "none"}
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "residual": {"insert": "output", "head_activation": "relu"},
    "unshared": {"insert": "branch"},
    "inverted": {"insert": "branch", "head_activation": "relu", "one_recurrence": True},
    "postact": _PLAIN_HEAD,
    "convlstm": {"cell_bias": False, "gate_activation": "sigmoid", **_PLAIN_HEAD},
    "convgru": {"gate_norm": True, **_PLAIN_HEAD},
}


@dataclass(frozen=True)
class StagePlan:
    """The description of a stage.

    Args:
        widths: channels of the branch of each block. Blocks of the same width share g1.
        exchanges: for each block, the module f_h by which the state enters it.
    """

    widths: Sequence[int]
    exchanges: Sequence[nn.Module]


class RLA(BlockMechanism):
    """Recurrent layer aggregation of a network. Convolutions are shared per stage, norms and exchanges are per block.

    Args:
        stages: descriptions of the stages of the network.
        state_channels: number of channels k of the state.
        insert: the input of g1: the residual "branch" y, the "output" x' or the "shortcut" s of the block.
        joins: whether the result of g1 is added "before" the recurrent convolution, h' = g2(tanh(BN(h + g1(·)))), or
            "after" it, h' = g2(tanh(BN(h))) + g1(·).
        cell: "preact" as above, "postact" for tanh(BN(g2(h + g1(·)))), or a "convlstm" or "convgru" cell with the input
            tanh(BN(g1(·))), or g1(·) if `cell_norm` is False.
        shared: whether the blocks of a stage share g1 and g2.
        exchange: whether blocks read the state.
        cross_layer: False starts the state from zero at every block.
        depthwise: whether g2 is depthwise, as for MobileNetV2.
        cell_bias: whether the convolutions of an LSTM or GRU cell have a bias.
        cell_norm: whether the input of an LSTM or GRU cell is normalized.
        gate_activation: the activation of the gates of an LSTM or GRU cell, "hard_sigmoid" or "sigmoid". None for the
            hard sigmoid of Keras in an LSTM cell, and the sigmoid in a GRU cell.
        forget_bias: the initial bias of the forget gate of an LSTM cell. None for one, as in Keras.
        gate_norm: whether the gates and the candidate of a GRU cell are normalized, as in the authors' program.
        one_recurrence: whether all stages share one g2, as in the published MobileNetV2.
        head_channels: channels of the backbone's last map, if a classifier reads the last state. None for no head.
        join: a convolution of the last state. Its result is added to the result of the network's last convolution. None
            if the last state is concatenated with the last map.
        head_norm: whether the last state is normalized.
        head_activation: the activation of the last state, or "none".
        reading: "paper" or "published". It is only recorded; the options above determine the computation.
        init: "paper", or "identity" for a network that ignores the state at initialization.
    """

    memory_scope: MemoryScope = "network"

    def __init__(
        self,
        stages: Sequence[StagePlan],
        *,
        state_channels: int = 32,
        insert: Insert = "branch",
        joins: Joins = "before",
        cell: Cell = "preact",
        shared: bool = True,
        exchange: bool = True,
        cross_layer: bool = True,
        depthwise: bool = False,
        cell_bias: bool = True,
        cell_norm: bool = True,
        gate_activation: GateActivation | None = None,
        forget_bias: float | None = None,
        gate_norm: bool = False,
        one_recurrence: bool = False,
        head_channels: int | None = None,
        join: nn.Module | None = None,
        head_norm: bool = True,
        head_activation: Activation = "tanh",
        reading: Reading = "paper",
        init: Init = "paper",
    ) -> None:
        super().__init__()
        expect_choice("insert", insert, ("branch", "output", "shortcut"))
        expect_choice("joins", joins, ("before", "after"))
        expect_choice("cell", cell, ("preact", "postact", "convlstm", "convgru"))
        expect_choice("head_activation", head_activation, ("tanh", "relu", "none"))
        expect_choice("reading", reading, ("paper", "published"))
        expect_choice("init", init, ("paper", "identity"))
        if state_channels < 1:
            raise ValueError(f"state_channels must be a whole number of at least 1, got {state_channels}")
        if joins == "after" and cell != "preact":
            raise ValueError(f"joins='after' is defined for cell='preact' alone, got cell={cell!r}")
        if not cell_norm and cell == "preact":
            raise ValueError("cell_norm=False is defined for cell='convlstm' and 'convgru', got cell='preact'")
        if depthwise and cell not in ("preact", "postact"):
            raise ValueError(f"depthwise=True is defined for cell='preact' and 'postact', got cell={cell!r}")
        if gate_activation is not None:
            expect_choice("gate_activation", gate_activation, ("hard_sigmoid", "sigmoid"))
            if cell not in GATED:
                raise ValueError(f"gate_activation is defined for cell='convlstm' and 'convgru', got cell={cell!r}")
        if forget_bias is not None and (cell != "convlstm" or not cell_bias):
            raise ValueError(
                f"forget_bias is defined for cell='convlstm' with cell_bias=True, got cell={cell!r}, {cell_bias=}"
            )
        if gate_norm and cell != "convgru":
            raise ValueError(f"gate_norm=True is defined for cell='convgru', got cell={cell!r}")
        if one_recurrence and not shared:
            raise ValueError("one_recurrence=True shares g2 over all stages, shared=False over none: give one of them")
        self.state_channels = state_channels
        self.insert = insert
        self.joins = joins
        self.cell = cell
        self.exchange = exchange
        self.cross_layer = cross_layer
        self.reading = reading
        self.head_activation = head_activation

        def recurrence() -> nn.Module:
            k = state_channels
            if cell == "convlstm":
                gates, forget = gate_activation or "hard_sigmoid", 1.0 if forget_bias is None else forget_bias
                return ConvLSTM(k, bias=cell_bias, forget_bias=forget, gate_activation=gates)
            if cell == "convgru":
                gates = gate_activation or "sigmoid"
                return ConvGRU(k, bias=cell_bias, gate_norm=gate_norm, gate_activation=gates)
            return nn.Conv2d(k, k, 3, padding=1, groups=k if depthwise else 1, bias=False)

        self.recurrent = recurrence() if one_recurrence else None  # shared by all stages
        normalize = cell_norm or cell == "preact"
        self.head_channels = head_channels
        # Without a head, the last block does not update the state, because nothing reads it.
        updating = [len(plan.widths) for plan in stages]
        updating[-1] -= head_channels is None
        self.stages = nn.ModuleList(
            _Stage(plan, count, state_channels, recurrence, shared, exchange, normalize, one_recurrence)
            for plan, count in zip(stages, updating, strict=True)
        )
        self.blocks = [len(plan.widths) for plan in stages]
        self.widens_classifier = False  # set by the host if it has added k inputs to the classifier
        self.joins_features = False  # set by the host if `forward_features` concatenates the last state
        self.join = join
        self.norm = nn.BatchNorm2d(state_channels) if head_channels is not None and head_norm else None
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for cell_module in [module for module in self.modules() if isinstance(module, ConvLSTM)]:
            cell_module.reset_biases()
        if init == "identity":
            paths = [path for stage in self.stages for path in stage.exchanges]  # type: ignore[union-attr]
            for path in paths if join is None else [*paths, join]:
                nn.init.zeros_([m for m in path.modules() if isinstance(m, nn.Conv2d)][-1].weight)
        record_description(self)

    # Methods that a block calls. The memory is the state, and whether it is the state of the network's last block.

    def addition(self, x: Tensor, memory: Any, place: Place) -> Tensor | None:
        return self.read(place.stage, place.index, self._arriving(memory), x)

    def branch_projection(self, place: Place) -> Tensor | None:
        reads_branch = self.insert == "branch" and self.updates(place.stage, place.index)
        return self.projection(place.stage, place.index) if reads_branch else None

    def leave(self, output: Tensor, values: BlockValues, memory: Any, place: Place) -> tuple[Tensor, Any]:
        stage, block = place.stage, place.index
        if not self.updates(stage, block):
            return output, None
        inserted = values.projected
        if inserted is None:
            read = values.output if self.insert == "output" else values.shortcut
            inserted = F.conv2d(read, self.projection(stage, block))  # type: ignore[arg-type]
        state = self.update(stage, block, self._arriving(memory), inserted)
        return output, (state, self.is_last(stage, block))

    def _arriving(self, memory: Any) -> Any:
        """Returns the state with which a block starts."""
        state = None if memory is None else memory[0]
        if self.cross_layer or state is None:
            return state
        # Multiplied by zero, not left out: DDP expects a gradient for every parameter.
        return tuple(0 * tensor for tensor in state) if isinstance(state, tuple) else 0 * state

    def join_features(self, features: Tensor, memory: Any) -> Tensor:
        """Concatenate the last map and the last state, if the classifier reads both.

        If the mechanism is switched off, the memory is None, and the classifier reads a state of zeros.
        """
        if memory is None:
            return self.join_zeros(features) if features.shape[1] == self.head_channels else features
        state, finished = memory
        return torch.cat((features, self.last(state)), 1) if self.joins_features and finished else features

    def join_zeros(self, features: Tensor) -> Tensor:
        """Concatenate the last map and a state of zeros."""
        return torch.cat((features, features.new_zeros(len(features), self.state_channels, *features.shape[2:])), 1)

    # Computation

    def read(self, stage: int, block: int, state: Any, x: Tensor) -> Tensor | None:
        """Returns f_h(h), which is added inside a block with input x, or None without exchange."""
        if not self.exchange:
            return None
        path: Any = self.stages[stage].exchanges[block]  # type: ignore[union-attr, index]
        return path(self._hidden(self._start(x) if state is None else pooled_to(x, state)))

    def is_last(self, stage: int, block: int) -> bool:
        return stage == len(self.blocks) - 1 and block == self.blocks[stage] - 1

    def updates(self, stage: int, block: int) -> bool:
        """Whether a block updates the state. The last block does so only if there is a head."""
        return self.head_channels is not None or not self.is_last(stage, block)

    def projection(self, stage: int, block: int) -> Tensor:
        """Returns the weight of g1 for a block."""
        return self.stages[stage].compression(block).weight  # type: ignore[union-attr, operator]

    def update(self, stage: int, block: int, state: Any, inserted: Tensor) -> Any:
        """Returns the next state h' from the state h and the projection p = g1(·), [B, k, H, W] (Figures 4, 6, 7).

        With the branch y, the shortcut s and the output x' = act(y + s) of the block, p is g1(y), g1(x') or g1(s),
        depending on `insert`. h is pooled to the size of p. Then

            preact, joins "before"    h' = g2(tanh(BN(h + p)))        v1, v3, v5
            preact, joins "after"     h' = g2(tanh(BN(h))) + p        v2, v4, v6
            postact                   h' = tanh(BN(g2(h + p)))
            convlstm                  (h', c') = LSTM(tanh(BN(p)), (h, c))        the equations of the cells are
            convgru                   h' = GRU(tanh(BN(p)), h)                    in recurrent_cells.py
        """
        modules: Any = self.stages[stage]
        norm = modules.norms[block] if len(modules.norms) else nn.Identity()
        recurrent = self.recurrent or modules.recurrence(block)
        if self.cell in GATED:
            state = self._start(inserted) if state is None else pooled_to(inserted, state)
            cell_input = norm(inserted).tanh() if len(modules.norms) else inserted
            return recurrent(cell_input, state)
        if self.joins == "after":
            state = self._start(inserted) if state is None else pooled_to(inserted, state)
            return recurrent(norm(state).tanh()) + inserted
        joined = inserted if state is None else pooled_to(inserted, state) + inserted
        if self.cell == "postact":
            return norm(recurrent(joined)).tanh()
        return recurrent(norm(joined).tanh())

    def last(self, state: Any) -> Tensor:
        """Returns the last state after its norm and activation, [B, k, H, W]."""
        hidden = self._hidden(state)
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.head_activation == "none":
            return hidden
        return hidden.relu() if self.head_activation == "relu" else hidden.tanh()

    def _start(self, like: Tensor) -> Any:
        shape = (like.shape[0], self.state_channels, *like.shape[2:])
        hidden = like.new_zeros(shape)
        if like.is_contiguous(memory_format=torch.channels_last):
            hidden = hidden.contiguous(memory_format=torch.channels_last)
        return (hidden, torch.zeros_like(hidden)) if self.cell == "convlstm" else hidden

    @staticmethod
    def _hidden(state: Any) -> Tensor:
        return state[0] if isinstance(state, tuple) else state

    def describe(self) -> dict[str, str]:
        """Returns the properties that the tensors do not determine, although they change the computed function."""
        return {
            "mechanism": "RLA",
            "reading": self.reading,
            "insert": self.insert,
            "joins": self.joins,
            "cell": self.cell,
            "head_activation": self.head_activation,
            "cross_layer": str(self.cross_layer),
        }

    def extra_repr(self) -> str:
        return f"state_channels={self.state_channels}, insert={self.insert!r}, joins={self.joins!r}, cell={self.cell!r}"


class _Stage(nn.Module):
    """The modules of one stage: one g1 per width and one g2, or one of each per block."""

    def __init__(
        self,
        plan: StagePlan,
        updating: int,
        state_channels: int,
        recurrence: Callable[[], nn.Module],
        shared: bool,
        exchange: bool,
        normalize: bool,
        one_recurrence: bool,
    ) -> None:
        super().__init__()
        block_widths = plan.widths[:updating]
        widths = list(dict.fromkeys(block_widths)) if shared else list(block_widths)
        self.shared = shared
        self.which = [widths.index(width) if shared else block for block, width in enumerate(block_widths)]
        self.compress = nn.ModuleList(nn.Conv2d(width, state_channels, 1, bias=False) for width in widths)
        count = 0 if one_recurrence else min(1, updating) if shared else updating
        self.recurrent = nn.ModuleList(recurrence() for _ in range(count))
        self.norms = nn.ModuleList(nn.BatchNorm2d(state_channels) for _ in range(updating if normalize else 0))
        self.exchanges = nn.ModuleList(plan.exchanges if exchange else ())

    def compression(self, block: int) -> nn.Module:
        return self.compress[self.which[block]]

    def recurrence(self, block: int) -> nn.Module:
        return self.recurrent[0 if self.shared else block]


def pooled_to(like: Tensor, state: Any) -> Any:
    """Returns the state at the size of `like`: average-pooled 2x2 if the size differs."""
    if isinstance(state, tuple):
        return tuple(pooled_to(like, tensor) for tensor in state)
    if state.shape[2:] == like.shape[2:]:
        return state
    return F.avg_pool2d(state, 2, ceil_mode=True, count_include_pad=False)
