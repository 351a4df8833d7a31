"""Lines through measurements: a linear fit, and the exponent of a power law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Line:
    """The least-squares line y = intercept + slope x.

    Args:
        slope: the slope.
        intercept: the value at zero.
        r_squared: the fraction of the variance of y that the line explains; one if y does not vary.
    """

    slope: float
    intercept: float
    r_squared: float

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


def linear_fit(x: Sequence[float], y: Sequence[float]) -> Line:
    """Returns the least-squares line through points, of which at least two have to differ in x."""
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if xs.shape != ys.shape or len(np.unique(xs)) < 2:
        raise ValueError(f"a line needs two points with different x, got x = {list(x)} and y = {list(y)}")
    centered = xs - xs.mean()
    slope = float((centered * (ys - ys.mean())).sum() / (centered**2).sum())
    intercept = float(ys.mean() - slope * xs.mean())
    residual, total = float(((ys - intercept - slope * xs) ** 2).sum()), float(((ys - ys.mean()) ** 2).sum())
    return Line(slope, intercept, 1 - residual / total if total else 1.0)


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Returns p of the power law y = a x^p: the slope of the line through the logarithms. All values are positive."""
    if min(*x, *y) <= 0:
        raise ValueError(f"a power law needs positive values, got x = {list(x)} and y = {list(y)}")
    return linear_fit(np.log(x).tolist(), np.log(y).tolist()).slope
