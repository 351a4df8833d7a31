"""Dense-and-implicit attention: one LSTM along the blocks of a stage scales their branches.

Paper: Huang et al., DIANet: Dense-and-Implicit Attention Network, AAAI 2020, section 3.

    (h_t, c_t) = LSTM(average of y_t, (h_{t-1}, c_{t-1}))        shared by the blocks t of a stage
    y_t'       = y_t ⊙ h_t

The gates of the LSTM are the sum of two functions, of the input and of h, each of two linear layers with a ReLU between
them. Its output is sigmoid(o) ⊙ sigmoid(c), so every scale is between 0 and 1.

    y   [B, C, H, W]; averages, h and c [B, C]; hidden layers C / reduction

`cross_layer=False` is a control: h and c start from zero at every block, with the same parameters.

Deviations: none. The default reduction gives the 28.4M parameters that MRLA reports for ResNet-50 (Tables 1 and 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .gates import BranchGate, UnitScale, fit_hidden, set_factors, set_to_zero
from .options import Init
from .protocol import MemoryScope, Place

DIA_REDUCTION = 20


class DIA(BranchGate):
    """Attention of DIANet. See the module docstring for the equations.

    Args:
        widths: channels of each stage.
        reduction: channels divided by those of the hidden layers of the LSTM.
        cross_layer: False starts the LSTM from zero at every block.
    """

    memory_scope: MemoryScope = "stage"

    def __init__(
        self,
        widths: Sequence[int],
        *,
        reduction: int = DIA_REDUCTION,
        cross_layer: bool = True,
        init: Init = "paper",
        drop_path: float = 0.0,
    ) -> None:
        super().__init__(init=init, drop_path=drop_path)
        self.cross_layer = cross_layer
        if not cross_layer:
            self.memory_scope = "none"
        self.unit_scale = UnitScale()
        self.stages = nn.ModuleList(
            nn.ModuleList((_gates(width, reduction), _gates(width, reduction))) for width in widths
        )
        if init == "identity":
            for layers in self.stages:
                for gates in layers:  # type: ignore[attr-defined]
                    set_to_zero(gates[-1])
            set_factors(self, 4)  # the output is a product of two sigmoids

    def attend(self, y: Tensor, inner: list[Tensor], memory: Any, place: Place) -> tuple[Tensor, Any]:
        average = y.mean((2, 3))
        starts = memory is None or not self.cross_layer
        hidden, cell = (average.new_zeros(average.shape),) * 2 if starts else memory
        layers: Any = self.stages[place.stage]
        input_gates, hidden_gates = layers
        i, g, f, o = (input_gates(average) + hidden_gates(hidden)).chunk(4, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.sigmoid()
        return y * self.unit_scale(hidden)[..., None, None], (hidden, cell)

    def describe(self) -> dict[str, str]:
        return {**super().describe(), "cross_layer": str(self.cross_layer)}

    def fit_layers(self, tensors: Mapping[str, Tensor]) -> None:
        for number, layers in enumerate(self.stages):
            for index in range(2):
                gates: Any = layers[index]  # type: ignore[index]
                fit_hidden((gates[0],), None, gates[2], tensors.get(f"stages.{number}.{index}.0.weight"))


def _gates(channels: int, reduction: int) -> nn.Sequential:
    hidden = max(1, channels // reduction)
    return nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, 4 * channels))
