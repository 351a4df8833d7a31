"""Statistics of the difference between two networks over several seeds.

Runs with the same seed see the same batches with the same augmentation, whatever the network. Differences are therefore
paired by seed. The confidence interval of their mean is Student's t interval over the seeds. If the interval contains
zero, the difference is reported as noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..tasks import Metric

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The paired difference of a metric between two networks.

    Args:
        mean: mean over the seeds of the second network's value minus the first network's.
        low, high: bounds of the confidence interval of the mean; None for a single seed.
    """

    mean: float
    low: float | None
    high: float | None

    @property
    def within_noise(self) -> bool:
        """Whether the interval contains zero or is unknown."""
        return self.low is None or self.high is None or self.low <= 0 <= self.high

    def format(self, metric: Metric) -> str:
        """Formats the mean and its interval without their unit: +0.51 (-0.20 to +1.22)."""
        mean = metric.format_difference(self.mean)
        if self.low is None or self.high is None:
            return mean
        return f"{mean} ({metric.format_difference(self.low)} to {metric.format_difference(self.high)})"


def paired_difference(first: Sequence[float], second: Sequence[float], resolution: float = 0.0) -> Difference:
    """Computes the mean of ``second - first`` over paired values, with Student's t interval.

    Args:
        first, second: one value for each seed, in the same order.
        resolution: the smallest difference that can be measured, such as one test image. It is the minimum half-width
            of the interval.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return Difference(mean, None, None)
    half_width = max(interval_half_width(differences), resolution)
    return Difference(mean, mean - half_width, mean + half_width)


def interval_half_width(values: Sequence[float]) -> float:
    """Returns half the width of Student's t interval of the mean of at least two values."""
    from scipy.special import stdtrit

    error = statistics.stdev(values) / math.sqrt(len(values))
    return float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * error


def spread(values: Sequence[float]) -> float:
    """Returns the standard deviation over the seeds; NaN for a single seed."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def verdict(model: str, first: str, difference: Difference, metric: Metric, seeds: int) -> str:
    """Returns one sentence about the difference between two networks and its significance.

    Args:
        model, first: names of the two networks.
        difference: the difference of ``model`` to ``first``.
        metric: the metric of the values.
        seeds: the number of seeds.
    """
    unit = metric.unit or f"in {metric.title}"
    mean = f"{metric.format_difference(difference.mean)} {unit}"
    if difference.low is None or difference.high is None:
        return f"{model} against {first}: {mean} with one seed, which says nothing about noise: use more."
    low, high = metric.format_difference(difference.low), metric.format_difference(difference.high)
    interval = f"{CONFIDENCE:.0%} interval {low} to {high}, {seeds} seeds"
    if difference.within_noise:
        return f"{model} against {first}: {mean}, within noise ({interval}): these runs do not tell the two apart."
    word = "better" if metric.is_better(difference.mean, 0.0) else "worse"
    return f"{model} is {word} than {first} by {metric.format_spread(abs(difference.mean))} {unit} ({interval})."
