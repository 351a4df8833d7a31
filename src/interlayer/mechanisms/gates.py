"""Attention on a residual branch, with which layer attention is compared.

A gate scales the branch y of a residual block before the shortcut is added.

    BranchAttention   any of timm's attention layers on y: SE, ECA, CBAM, GC, NL
    DIA               one LSTM for all blocks of a stage reads the averages of the branches sequentially and computes
                      their scales.
                      Huang et al., DIANet: Dense-and-Implicit Attention Network, AAAI 2020, section 3
    BridgeAttention   the scale is computed from the averages of all maps of the block, not only of the last one.
                      Zhao et al., BA-Net: Bridge Attention for Deep Convolutional Neural Networks, ECCV 2022, section 3

Shapes: y [B, C, H, W]; a map inside the branch [B, C_i, H_i, W_i]; averages [B, C]; scales [B, C, 1, 1].

`init="identity"` starts every gate at one and every addition at zero, which preserves the function of a trained
network. The layer before a sigmoid is initialized to zero, and the sigmoid, which is then 1/2, is always multiplied by
two (`UnitScale`). The factor is a tensor of the state dict. `init="paper"` has no such factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import create_attn
from timm.layers.eca import EcaModule
from timm.layers.squeeze_excite import SEModule
from torch import Tensor, nn

from .description import record_description
from .options import Init, OptionError, expect_choice, expect_odd
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


# The last layer of each of timm's gates, which an identity start initializes to zero.
LAST_LAYERS = {
    "se": ("fc2",),
    "eca": ("conv",),
    "cbam": ("channel.fc2", "spatial.conv.bn"),
    "gc": ("mlp_scale.fc2",),
    "nl": ("norm",),
}


class UnitScale(nn.Module):
    """Multiplies gates by a factor that makes them one at an identity start. Without a factor, returns its input."""

    factor: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", None)

    def set(self, factor: float | None) -> None:
        """Set the factor, which becomes a tensor of the state dict, or remove it."""
        self.register_buffer("factor", None if factor is None else torch.tensor(float(factor)))

    def forward(self, gates: Tensor) -> Tensor:
        return gates if self.factor is None else gates * self.factor


class BranchGate(BlockMechanism):
    """Base class of attention on the branch.

    Args:
        init: "paper", or "identity" to start with y' = y.
    """

    memory_scope: MemoryScope = "none"

    def __init__(self, *, init: Init = "paper") -> None:
        super().__init__()
        expect_choice("init", init, ("paper", "identity"))
        record_description(self)

    def describe(self) -> dict[str, str]:
        return {"mechanism": type(self).__name__}


class BranchAttention(BranchGate):
    """One of timm's attention layers on the branch.

    Args:
        channels: C.
        kind: the name of the layer in timm: "se", "eca", "cbam", "gc" or "nl".
        kernel_size: the kernel size of ECA's convolution, an odd number. None derives it from C as in its paper.
    """

    def __init__(self, channels: int, *, kind: str, init: Init = "paper", kernel_size: int | None = None) -> None:
        super().__init__(init=init)
        self.kind = kind
        self.attention: Any
        if kernel_size is None:
            self.attention = create_attn(ON_BRANCH[kind], channels)
        else:
            expect_odd("kernel_size", kernel_size)
            if kind != "eca":
                raise OptionError(f"kernel_size is an option of eca, {kind} has none")
            self.attention = EcaModule(kernel_size=kernel_size)
        for module in list(self.attention.modules()):
            if isinstance(getattr(module, "gate", None), nn.Module):  # the sigmoid
                module.gate = nn.Sequential(module.gate, UnitScale())
        if init == "identity":
            for name in LAST_LAYERS[kind]:
                _set_to_zero(self.attention.get_submodule(name))
            _set_factors(self, 2)

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

    def __init__(self, widths: Sequence[int], *, init: Init = "paper") -> None:
        super().__init__(init=init)
        self.unit_scale = UnitScale()
        self.stages = nn.ModuleList(nn.ModuleList((_gates(width), _gates(width))) for width in widths)
        if init == "identity":
            for layers in self.stages:
                for gates in layers:  # type: ignore[attr-defined]
                    _set_to_zero(gates[-1])
            _set_factors(self, 4)  # the output is a product of two sigmoids

    def gate(self, y: Tensor, inner: list[Tensor], memory: Any, place: Place) -> tuple[Tensor, Any]:
        average = y.mean((2, 3))
        hidden, cell = memory if memory is not None else (average.new_zeros(average.shape),) * 2
        layers: Any = self.stages[place.stage]
        input_gates, hidden_gates = layers
        i, g, f, o = (input_gates(average) + hidden_gates(hidden)).chunk(4, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.sigmoid()
        return y * self.unit_scale(hidden)[..., None, None], (hidden, cell)


def _gates(channels: int) -> nn.Sequential:
    hidden = max(1, channels // DIA_REDUCTION)
    return nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, 4 * channels))


class BridgeAttention(BranchGate):
    """Bridge attention: y' = y ⊙ sigmoid(W ReLU(sum over the block's maps i of BN_i(W_i average of map i))).

    Args:
        channels: C.
        inner_channels: channels of the maps inside the branch, in order, without y, which is the last map.
    """

    def __init__(self, channels: int, inner_channels: Sequence[int], *, init: Init = "paper") -> None:
        super().__init__(init=init)
        self.unit_scale = UnitScale()
        hidden = max(1, channels // REDUCTION)
        self.bridges = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden, bias=False), nn.BatchNorm1d(hidden))
            for width in (*inner_channels, channels)
        )
        self.scale = nn.Linear(hidden, channels, bias=False)
        if init == "identity":
            _set_to_zero(self.scale)
            _set_factors(self, 2)

    def gate(self, y: Tensor, inner: list[Tensor], memory: Any, place: Place) -> tuple[Tensor, Any]:
        averages = [x.mean((2, 3)) for x in (*inner, y)]
        bridged = sum(bridge(average) for bridge, average in zip(self.bridges, averages, strict=True))
        scale = self.unit_scale(self.scale(bridged.relu()).sigmoid())  # type: ignore[union-attr]
        return y * scale[..., None, None], None


def fit_gate_factors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the gates of `model` the factors that they had when `tensors` was saved.

    Without it, the gates of a network that was built in the other way would not fit the tensors.
    """
    for gate_name, gate in model.named_modules():
        if not isinstance(gate, BranchGate) or not any(name.startswith(f"{gate_name}.") for name in tensors):
            continue
        for name, module in gate.named_modules(prefix=gate_name):
            if isinstance(module, UnitScale):
                saved = tensors.get(f"{name}.factor")
                module.set(None if saved is None else saved.item())
                module.to(next(gate.parameters()).device)


def _set_factors(gate: nn.Module, factor: float) -> None:
    for module in gate.modules():
        if isinstance(module, UnitScale):
            module.set(factor)


def _set_to_zero(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
