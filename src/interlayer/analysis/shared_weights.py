"""How strongly layers at each distance are read: the 1x1 weights that a DenseNet's layers share (RLA, Figure 2)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

WEIGHT = re.compile(r"stages\.(\d+)\.shared\.conv\.weight$")


@dataclass(frozen=True)
class SharedWeights:
    """The shared weights of one stage.

    Args:
        stage: its number, from 1.
        norms: the mean absolute weight of each lag, or of each ordinal, 1 first.
        amplitude, rate: of the exponential a exp(-r l) that fits them best; not a number where none was found.
        r_squared: the share of their variance that it explains.
    """

    stage: int
    norms: np.ndarray
    amplitude: float
    rate: float
    r_squared: float

    @property
    def fitted(self) -> np.ndarray:
        return self.amplitude * np.exp(-self.rate * np.arange(1, len(self.norms) + 1))


def shared_weights(state_dict: Mapping[str, Tensor], *, growth: int = 12) -> list[SharedWeights]:
    """The L1 norms of the shared 1x1 weights of a Shared-Lag or Shared-Ordinal DenseNet, and their exponential fits.

    Args:
        state_dict: its weights.
        growth: channels of each layer.
    """
    found = {int(match[1]): tensor for name, tensor in state_dict.items() if (match := WEIGHT.search(name))}
    if not found:
        raise ValueError(
            "the checkpoint has no shared 1x1 weights (stages.0.shared.conv.weight, ...): expected one of "
            "densenet100_cifar_shared_lag or densenet100_cifar_shared_ordinal"
        )
    result = []
    for stage, weight in sorted(found.items()):
        if weight.dim() != 4 or weight.shape[1] % growth:
            raise ValueError(f"stage {stage} has weights {tuple(weight.shape)}, expected a multiple of {growth} inputs")
        norms = weight.double().flatten(1).unflatten(1, (-1, growth)).abs().mean((0, 2)).numpy()
        if not np.isfinite(norms).all() or norms.max() == 0:
            raise ValueError(f"the shared weights of stage {stage} are zero or not finite")
        result.append(_fitted(stage + 1, norms))
    return result


def _fitted(stage: int, norms: np.ndarray) -> SharedWeights:
    from scipy.optimize import curve_fit  # takes a second to import

    lags = np.arange(1, len(norms) + 1)
    try:
        (amplitude, rate), _ = curve_fit(
            lambda lag, amplitude, rate: amplitude * np.exp(-rate * lag), lags, norms, p0=(norms[0], 0.1), maxfev=10_000
        )
    except (RuntimeError, TypeError):  # no exponential fits, or there are fewer points than it has numbers
        return SharedWeights(stage, norms, *[float("nan")] * 3)
    residual = float(((norms - amplitude * np.exp(-rate * lags)) ** 2).sum())
    total = float(((norms - norms.mean()) ** 2).sum())
    return SharedWeights(stage, norms, float(amplitude), float(rate), 1 - residual / total if total else 1.0)
