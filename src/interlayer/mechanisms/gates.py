"""Attention on a residual branch, with which layer attention is compared.

A gate scales the branch y of a residual block before the shortcut is added.

    BranchAttention   any of timm's attention layers on y: SE, ECA, CBAM, GC, NL
    DIA               one LSTM for all blocks of a stage reads the averages of the branches sequentially and computes
                      their scales.
                      Huang et al., DIANet: Dense-and-Implicit Attention Network, AAAI 2020, section 3
    BridgeAttention   the scale is computed from the averages of all maps of the block, not only of the last one.
                      Zhao et al., BA-Net: Bridge Attention for Deep Convolutional Neural Networks, ECCV 2022, section 3

Shapes: y [B, C, H, W]; a map inside the branch [B, C_i, H_i, W_i]; averages [B, C]; scales [B, C, 1, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from timm.layers import create_attn
from timm.layers.squeeze_excite import SEModule
from torch import Tensor, nn

from .description import record_description
from .protocol import BlockMechanism, MemoryScope, Place

REDUCTION = 16  # of the hidden layer of SE and bridge attention, as in their papers
DIA_REDUCTION = 4  # of the hidden layers of the LSTM of DIA
# timm's attention layers, as its ResNets use them. SE has no bias here, in agreement with the counts that RLA reports.
ON_BRANCH: dict[str, Any] = {
    "se": partial(SEModule, rd_ratio=1 / REDUCTION, bias=False),
    "eca": "eca",
    "cbam": "cbam",
    "gc": "gc",
    "nl": "nl",
}


class BranchGate(BlockMechanism):
    """Base class of attention on the branch."""

    memory_scope: MemoryScope = "none"

    def __init__(self) -> None:
        super().__init__()
        record_description(self)

    def describe(self) -> dict[str, str]:
        return {"mechanism": type(self).__name__}


class BranchAttention(BranchGate):
    """One of timm's attention layers on the branch.

    Args:
        channels: C.
        kind: the name of the layer in timm: "se", "eca", "cbam", "gc" or "nl".
    """

    def __init__(self, channels: int, *, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.attention = create_attn(ON_BRANCH[kind], channels)

    def gate(self, y: Tensor, inner: list[Tensor], memory: Any, place: Place) -> tuple[Tensor, Any]:
        return self.attention(y), None

    def describe(self) -> dict[str, str]:
        return {**super().describe(), "kind": self.kind}


class DIA(BranchGate):
    """Attention of DIANet: y' = y ⊙ h, where (h, c) = LSTM(average of y, (h, c) of the previous block).

    The blocks of a stage share the LSTM. Its gates are the sum of two functions, of the input and of h, each of two
    linear layers with a ReLU between them. Its output is sigmoid(o) ⊙ sigmoid(c), so every scale is between 0 and 1.

    Args:
        widths: channels of each stage.
    """

    memory_scope = "stage"

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList((_gates(width), _gates(width))) for width in widths)

    def gate(self, y: Tensor, inner: list[Tensor], memory: Any, place: Place) -> tuple[Tensor, Any]:
        average = y.mean((2, 3))
        hidden, cell = memory if memory is not None else (average.new_zeros(average.shape),) * 2
        layers: Any = self.stages[place.stage]
        input_gates, hidden_gates = layers
        i, g, f, o = (input_gates(average) + hidden_gates(hidden)).chunk(4, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.sigmoid()
        return y * hidden[..., None, None], (hidden, cell)


def _gates(channels: int) -> nn.Sequential:
    hidden = max(1, channels // DIA_REDUCTION)
    return nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, 4 * channels))


class BridgeAttention(BranchGate):
    """Bridge attention: y' = y ⊙ sigmoid(W ReLU(sum over the block's maps i of BN_i(W_i average of map i))).

    Args:
        channels: C.
        inner_channels: channels of the maps inside the branch, in order, without y, which is the last map.
    """

    def __init__(self, channels: int, inner_channels: Sequence[int]) -> None:
        super().__init__()
        hidden = max(1, channels // REDUCTION)
        self.bridges = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden, bias=False), nn.BatchNorm1d(hidden))
            for width in (*inner_channels, channels)
        )
        self.scale = nn.Linear(hidden, channels, bias=False)

    def gate(self, y: Tensor, inner: list[Tensor], memory: Any, place: Place) -> tuple[Tensor, Any]:
        averages = [x.mean((2, 3)) for x in (*inner, y)]
        bridged = sum(bridge(average) for bridge, average in zip(self.bridges, averages, strict=True))
        return y * self.scale(bridged.relu()).sigmoid()[..., None, None], None  # type: ignore[union-attr]
