"""Convolutional LSTM and GRU cells, which recurrent layer aggregation can use to update its state.

Paper: Recurrence along Depth, NeurIPS 2021. Appendix B.4.1: the updates of its ConvLSTM are "exactly the same as those
in the Keras official implementation of the class ConvLSTM2DCell". In 2021 the gates of that class were hard sigmoids,
clip(0.2 x + 0.5, 0, 1), and the bias of its forget gate was initialized to one. Section 2 mentions GRU cells, without
equations; the authors' program has one, with normalized gates.

    x, h, c    [B, k, H, W]: the input, the state and the cell state
    a(x)       the hard sigmoid, or the sigmoid
    N          GroupNorm of one group, eps 1e-6, or the identity

    ConvLSTM   i, f, o, g = conv3x3([x, h])
               c' = a(f) c + a(i) tanh(g)
               h' = a(o) tanh(c')

    ConvGRU    r, u = conv3x3([x, h]);  r = a(N(r)), u = a(N(u))
               o = tanh(N(conv3x3([x, r h])))
               h' = u h + (1 - u) o        with norms, as in the authors' program
               h' = (1 - u) h + u o        without norms

Deviations: weights are initialized like those of the other convolutions of the mechanism, not as in Keras.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from .description import record_flag

GateActivation = Literal["hard_sigmoid", "sigmoid"]


def hard_sigmoid(x: Tensor) -> Tensor:
    """Keras's hard sigmoid of 2021, clip(0.2 x + 0.5, 0, 1). PyTorch's has the slope 1 / 6."""
    return (0.2 * x + 0.5).clamp(0, 1)


class GatedCell(nn.Module):
    """Base class of the cells: the activation of the gates.

    Hard sigmoids are recorded by the tensor `hard_gates` of the state dict. Weights without it, such as those of
    earlier versions, were trained with sigmoids.
    """

    hard_gates: Tensor | None

    def __init__(self, gate_activation: GateActivation) -> None:
        super().__init__()
        record_flag(self, "hard_gates", gate_activation == "hard_sigmoid", known_by="gates.weight")

    def activated(self, gates: Tensor) -> Tensor:
        return gates.sigmoid() if self.hard_gates is None else hard_sigmoid(gates)


class ConvLSTM(GatedCell):
    """A ConvLSTM cell without peepholes. See the module docstring for the equations.

    Args:
        channels: number of channels k of the input, the state and the cell state.
        bias: whether the convolution has a bias.
        forget_bias: the initial bias of the forget gate.
        gate_activation: the activation of the gates.
    """

    def __init__(
        self,
        channels: int,
        *,
        bias: bool = True,
        forget_bias: float = 1.0,
        gate_activation: GateActivation = "hard_sigmoid",
    ) -> None:
        super().__init__(gate_activation)
        self.forget_bias = forget_bias
        self.gates = nn.Conv2d(2 * channels, 4 * channels, 3, padding=1, bias=bias)
        self.reset_biases()

    @torch.no_grad()
    def reset_biases(self) -> None:
        """Initialize the bias of the forget gate to `forget_bias` and the others to zero."""
        if self.gates.bias is not None:
            self.gates.bias.zero_().chunk(4)[1].fill_(self.forget_bias)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, cell = state
        i, f, o, g = self.gates(torch.cat((x, hidden), 1)).chunk(4, 1)
        cell = self.activated(f) * cell + self.activated(i) * g.tanh()
        return self.activated(o) * cell.tanh(), cell


class ConvGRU(GatedCell):
    """A ConvGRU cell. See the module docstring for the equations.

    Args:
        channels: number of channels k of the input and the state.
        bias: whether the convolutions have a bias.
        gate_norm: whether the gates and the candidate are normalized, and the update gate keeps the state.
        gate_activation: the activation of the gates.
    """

    def __init__(
        self,
        channels: int,
        *,
        bias: bool = True,
        gate_norm: bool = False,
        gate_activation: GateActivation = "sigmoid",
    ) -> None:
        super().__init__(gate_activation)
        self.gate_norm = gate_norm
        self.gates = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, bias=bias)
        self.candidate = nn.Conv2d(2 * channels, channels, 3, padding=1, bias=bias)
        self.reset_norm, self.update_norm, self.candidate_norm = (
            nn.GroupNorm(1, channels, eps=1e-6) if gate_norm else nn.Identity() for _ in range(3)
        )

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        reset, update = self.gates(torch.cat((x, hidden), 1)).chunk(2, 1)
        reset, update = self.activated(self.reset_norm(reset)), self.activated(self.update_norm(update))
        candidate = self.candidate_norm(self.candidate(torch.cat((x, reset * hidden), 1))).tanh()
        if self.gate_norm:
            return update * hidden + (1 - update) * candidate
        return (1 - update) * hidden + update * candidate
