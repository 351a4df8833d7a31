"""Context broadcasting: uniform attention for transformers, in one line.

Paper: Scratching Visual Transformer's Back with Uniform Attention, ICCV 2023, section 3.2.

    CB    x_i' = (x_i + mean over tokens j of x_j) / 2           Eq. 1; no parameters
    CB_S  x_i' = x_i + Λ ⊙ mean over tokens j of x_j             one parameter for each channel

The mean is over all tokens, class and other prefix tokens included.

    x   [B, N, C], or [B, H, W, C]

Deviations: none. The text does not say where Λ starts; here at zero, where CB_S is the identity.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .description import record_description


class ContextBroadcast(nn.Module):
    """Gives every token a share of the average token.

    Args:
        channels: C, for the scaled form; it is not needed for the other.
        scaled: CB_S instead of CB.
    """

    def __init__(self, channels: int | None = None, *, scaled: bool = False) -> None:
        super().__init__()
        if scaled and channels is None:
            raise ValueError("the scaled form has one parameter for each channel: give channels=")
        self.scale = nn.Parameter(torch.zeros(channels)) if scaled and channels is not None else None
        record_description(self)

    def forward(self, x: Tensor) -> Tensor:
        average = x.mean(tuple(range(1, x.dim() - 1)), keepdim=True)
        if self.scale is not None:
            return torch.addcmul(x, self.scale.to(x.dtype), average)
        return torch.lerp(x, average, 0.5)

    def describe(self) -> dict[str, str]:
        return {"mechanism": "ContextBroadcast", "scaled": str(self.scale is not None)}

    def extra_repr(self) -> str:
        return f"scaled={self.scale is not None}"
