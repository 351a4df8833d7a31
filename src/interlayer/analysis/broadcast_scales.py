"""Scales of context broadcasting by depth (CB, section 3.3, Figure 8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..hosts import attached_mechanisms
from ..mechanisms import ContextBroadcast


@dataclass(frozen=True)
class BroadcastScale:
    """Statistics of the scales Λ of one context broadcasting.

    Args:
        name: name of the component that it is attached to.
        ratio: |λ_0.1| / |λ_0.9|, the ratio of the 10% and 90% quantiles of |λ|: near one if all channels have similar
            scales. NaN if the scales are zero, as before training.
        mean: mean of λ.
        channels: number of scales.
    """

    name: str
    ratio: float
    mean: float
    channels: int


def scale_statistics(scales: Tensor) -> tuple[float, float]:
    """Returns |λ_0.1| / |λ_0.9|, the ratio of the 10% and 90% quantiles of |λ|, and the mean of λ, for scales [C]."""
    values = scales.detach().double()
    low, high = torch.quantile(values.abs(), values.new_tensor([0.1, 0.9])).tolist()
    return low / high if high else float("nan"), float(values.mean())


def broadcast_scales(model: nn.Module) -> list[BroadcastScale]:
    """Returns statistics of the scales of every scaled context broadcasting, in the order of depth (CB, Figure 8).

    Args:
        model: a network with `cb:scaled=true` attached.

    Raises:
        ValueError: the network has no scaled context broadcasting.
    """
    result = []
    for name, mechanism in attached_mechanisms(model).items():
        if isinstance(mechanism, ContextBroadcast) and mechanism.scale is not None:
            statistics = scale_statistics(mechanism.scale)
            result.append(BroadcastScale(name.rpartition(".")[0], *statistics, mechanism.scale.numel()))
    if not result:
        raise ValueError(
            f"{type(model).__name__} has no scaled context broadcasting: attach it as cb:scaled=true and train it"
        )
    return result
