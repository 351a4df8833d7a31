"""Double attention: global features are gathered over the map, then distributed to every pixel.

Paper: Chen et al., A²-Nets: Double Attention Networks, NeurIPS 2018, section 3.

    A = W_A y        B = softmax over pixels of W_B y        V = softmax over the n features of W_V y
    G = A Bᵀ                                                 the m x n gathered features
    y' = y + BN(W_Z G V)                                     every pixel receives a mixture of the n features

    y   [B, C, H, W]; A [B, m, HW]; B, V [B, n, HW]; G [B, m, n]

Deviations: none where the text is explicit. It does not specify the norm; here, as in a non-local block, a BatchNorm
follows the last convolution and every convolution has a bias. m = n = C / 2, which with two blocks in the second stage
and three in the third gives the 33.0M parameters that the paper prints for ResNet-50 (docs/deviations.md).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .gates import BranchGate, set_to_zero
from .options import Init
from .protocol import Place

DOUBLE_REDUCTION = 2


class DoubleAttention(BranchGate):
    """Double attention on the branch. See the module docstring for the equations.

    Args:
        channels: C.
        reduction: C divided by m and by n.
    """

    def __init__(
        self, channels: int, *, reduction: int = DOUBLE_REDUCTION, init: Init = "paper", drop_path: float = 0.0
    ) -> None:
        super().__init__(init=init, drop_path=drop_path)
        hidden = max(1, channels // reduction)
        self.features = nn.Conv2d(channels, hidden, 1)  # A
        self.gathering = nn.Conv2d(channels, hidden, 1)  # B
        self.distribution = nn.Conv2d(channels, hidden, 1)  # V
        self.output = nn.Conv2d(hidden, channels, 1)  # Z
        self.norm = nn.BatchNorm2d(channels)
        if init == "identity":
            set_to_zero(self.norm)

    def attend(self, y: Tensor, inner: list[Tensor], memory: Any, place: Place) -> tuple[Tensor, Any]:
        features = self.features(y).flatten(2)
        gathering = self.gathering(y).flatten(2).softmax(2)
        distribution = self.distribution(y).flatten(2).softmax(1)
        gathered = features @ gathering.transpose(1, 2)
        distributed = (gathered @ distribution).unflatten(2, y.shape[2:])
        return y + self.norm(self.output(distributed)), None
