"""Bridge attention: the scale of a branch is computed from all maps of its block.

Paper: Zhao et al., BA-Net: Bridge Attention for Deep Convolutional Neural Networks, ECCV 2022, section 3.

    y' = y ⊙ sigmoid(W ReLU(sum over the maps i of the block of BN_i(W_i average of map i)))

    y   [B, C, H, W]; a map inside the branch [B, C_i, H_i, W_i]; hidden layer C / reduction

Deviations: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .gates import REDUCTION, BranchGate, UnitScale, set_factors, set_to_zero
from .options import Init
from .protocol import Place


class BridgeAttention(BranchGate):
    """Bridge attention. See the module docstring for the equation.

    Args:
        channels: C.
        inner_channels: channels of the maps inside the branch, in order, without y, which is the last map.
        reduction: C divided by the channels of the hidden layer.
    """

    def __init__(
        self,
        channels: int,
        inner_channels: Sequence[int],
        *,
        reduction: int = REDUCTION,
        init: Init = "paper",
        drop_path: float = 0.0,
    ) -> None:
        super().__init__(init=init, drop_path=drop_path)
        self.unit_scale = UnitScale()
        hidden = max(1, channels // reduction)
        self.bridges = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden, bias=False), nn.BatchNorm1d(hidden))
            for width in (*inner_channels, channels)
        )
        self.scale = nn.Linear(hidden, channels, bias=False)
        if init == "identity":
            set_to_zero(self.scale)
            set_factors(self, 2)

    def attend(self, y: Tensor, inner: list[Tensor], memory: Any, place: Place) -> tuple[Tensor, Any]:
        averages = [x.mean((2, 3)) for x in (*inner, y)]
        bridged = sum(bridge(average) for bridge, average in zip(self.bridges, averages, strict=True))
        scale = self.unit_scale(self.scale(bridged.relu()).sigmoid())  # type: ignore[union-attr]
        return y * scale[..., None, None], None
