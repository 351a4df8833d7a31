"""Norms of the 1x1 weights that the layers of a DenseNet share, by the distance between layers (RLA, Figure 2)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

WEIGHT = re.compile(r"stages\.(\d+)\.shared\.conv\.weight$")


@dataclass(frozen=True)
class SharedWeights:
    """Norms of the shared weights of one stage.

    Args:
        stage: number of the stage, starting from 1.
        norms: mean absolute weight for each lag or ordinal, starting from 1.
        amplitude: a of the fitted exponential a exp(-r l); NaN if the fit failed.
        rate: r of the fitted exponential; NaN if the fit failed.
        r_squared: fraction of the variance of the norms that the fit explains.
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
    """Returns the L1 norms of the shared 1x1 weights of a Shared-Lag or Shared-Ordinal DenseNet with exponential fits.

    Args:
        state_dict: state dict of the network.
        growth: growth rate, the number of output channels of each layer.
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
    from scipy.optimize import curve_fit  # imported here because it takes a second

    lags = np.arange(1, len(norms) + 1)
    try:
        (amplitude, rate), _ = curve_fit(
            lambda lag, amplitude, rate: amplitude * np.exp(-rate * lag), lags, norms, p0=(norms[0], 0.1), maxfev=10_000
        )
    except (RuntimeError, TypeError):  # the fit did not converge, or has fewer points than parameters
        return SharedWeights(stage, norms, *[float("nan")] * 3)
    residual = float(((norms - amplitude * np.exp(-rate * lags)) ** 2).sum())
    total = float(((norms - norms.mean()) ** 2).sum())
    return SharedWeights(stage, norms, float(amplitude), float(rate), 1 - residual / total if total else 1.0)
