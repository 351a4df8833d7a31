"""Statistics of the differences between networks over several seeds.

Runs with the same seed see the same batches with the same augmentation, whatever the network. Differences d_1, ..., d_n
are therefore paired by seed. With their mean m and standard deviation s:

    interval    m ± t(n - 1, 97.5%) s / sqrt(n), Student's 95% confidence interval of the mean
    p           of the paired t-test, 2 P(T_{n-1} > |m| sqrt(n) / s)
    Holm        of k tests with the p-values p_(1) <= ... <= p_(k): the i-th is adjusted to the maximum over j <= i of
                min(1, (k - j + 1) p_(j)), so that at most one comparison in twenty reports any difference that does not
                exist
    seeds       the smallest n with P(T'_{n-1, δ sqrt(n) / s} > t(n - 1, 1 - 2.5% / k)) >= 80%: with so many seeds, the
                test finds a difference of δ with that power, even if it is the first of k in Holm's order. T' is
                noncentral t; the other tail is neglected

A difference is reported as noise if its adjusted p-value is not below 5%. With a single test this is the case if the
interval contains zero. Intervals are individual also where several networks are compared; only the decision is
adjusted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..tasks import Metric

CONFIDENCE = 0.95
POWER = 0.8
HALF_A_POINT = 0.005  # the difference for which the number of seeds is computed
MANY_SEEDS = 1000  # beyond this number of seeds, the exact number does not matter


@dataclass(frozen=True)
class Difference:
    """The paired difference of a metric between two networks.

    Args:
        mean: mean over the seeds of the second network's value minus the first network's.
        low, high: bounds of the confidence interval of the mean; None for a single seed.
        p: the p-value of the paired t-test; None for a single seed.
        adjusted_p: the p-value after Holm's correction for the number of tests; None if it was not corrected.
        spread: standard deviation of the paired differences; None for a single seed.
    """

    mean: float
    low: float | None
    high: float | None
    p: float | None = None
    adjusted_p: float | None = None
    spread: float | None = None

    @property
    def within_noise(self) -> bool:
        """Whether the interval contains zero or is unknown, or the adjusted p-value is too large."""
        if self.low is None or self.high is None or self.low <= 0 <= self.high:
            return True
        return self.adjusted_p is not None and self.adjusted_p >= 1 - CONFIDENCE

    def format(self, metric: Metric) -> str:
        """Formats the mean and its interval without their unit: +0.51 (-0.20 to +1.22)."""
        mean = metric.format_difference(self.mean)
        if self.low is None or self.high is None:
            return mean
        return f"{mean} ({metric.format_difference(self.low)} to {metric.format_difference(self.high)})"


def paired_difference(first: Sequence[float], second: Sequence[float], resolution: float = 0.0) -> Difference:
    """Computes the mean of ``second - first`` over paired values, with Student's t interval and test.

    Args:
        first, second: one value for each seed, in the same order.
        resolution: the smallest difference that can be measured, such as one test image. It is the minimum half-width
            of the interval, and a mean that does not exceed it has a p-value of one.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return Difference(mean, None, None)
    resolution *= 1 + 1e-9  # one more image with every seed is a difference of one image, whatever its rounding
    half_width = max(interval_half_width(differences), resolution)
    p = 1.0 if abs(mean) <= resolution else _p_value(differences)
    return Difference(mean, mean - half_width, mean + half_width, p, spread=statistics.stdev(differences))


def interval_half_width(values: Sequence[float]) -> float:
    """Returns half the width of Student's t interval of the mean of at least two values."""
    from scipy.special import stdtrit

    error = statistics.stdev(values) / math.sqrt(len(values))
    return float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * error


def _p_value(values: Sequence[float]) -> float:
    """Returns the p-value of the t-test that the mean of at least two values is zero."""
    from scipy.special import stdtr

    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return 2 * float(stdtr(len(values) - 1, -abs(mean) / error))


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns the p-values after Holm's correction for their number, in the same order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def adjust(differences: Sequence[Difference]) -> list[Difference]:
    """Returns the differences with p-values adjusted to their number. Those of single seeds stay as they are."""
    p_values = holm([1.0 if difference.p is None else difference.p for difference in differences])
    return [
        difference if difference.p is None else replace(difference, adjusted_p=p)
        for difference, p in zip(differences, p_values, strict=True)
    ]


def seeds_needed(spread: float, difference: float = HALF_A_POINT, tests: int = 1) -> int:
    """Returns the number of seeds with which a paired t-test finds a difference with a power of 80%.

    See the module docstring for the formula.

    Args:
        spread: standard deviation of the paired differences.
        difference: the difference to be found.
        tests: the number of differences that are tested, to which the decision is adjusted.

    Returns:
        The number of seeds, at least 2 and at most `MANY_SEEDS`.
    """
    from scipy.special import nctdtr, stdtrit

    for seeds in range(2, MANY_SEEDS):
        limit = float(stdtrit(seeds - 1, 1 - (1 - CONFIDENCE) / (2 * tests)))
        effect = difference * math.sqrt(seeds) / spread if spread else math.inf
        if effect > 100 or 1 - float(nctdtr(seeds - 1, effect, limit)) >= POWER:  # the function overflows far beyond
            return seeds
    return MANY_SEEDS


def seeds_sentence(differences: Sequence[Difference], metric: Metric, seeds: int) -> str:
    """Returns how many more seeds would tell a difference of half a point, by the largest spread of the differences.

    The sentence is empty for a metric without points, and if no spread is known.

    Args:
        seeds: the number of seeds so far.
    """
    spreads = [difference.spread for difference in differences if difference.spread is not None]
    if not metric.percent or not spreads:
        return ""
    needed = seeds_needed(max(spreads), tests=len(differences))
    most = f"{'up to ' if len(spreads) > 1 else ''}{metric.format_spread(max(spreads))} points"
    basis = f"paired differences spread by {most}"
    if needed <= seeds:
        return f"{seeds} seeds tell a difference of half a point with a power of {POWER:.0%}: {basis}."
    more = f"{needed - seeds:,} more" if needed < MANY_SEEDS else f"More than {MANY_SEEDS:,}"
    noun = "seed" if more == "1 more" else "seeds"
    return f"{more} {noun} would tell a difference of half a point with a power of {POWER:.0%}: {basis}."


def spread(values: Sequence[float]) -> float:
    """Returns the standard deviation over the seeds; NaN for a single seed."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def verdict(model: str, first: str, difference: Difference, metric: Metric, seeds: int, tests: int = 1) -> str:
    """Returns one sentence about the difference between two networks and its significance.

    Args:
        model, first: names of the two networks.
        difference: the difference of ``model`` to ``first``.
        metric: the metric of the values.
        seeds: the number of seeds.
        tests: the number of differences that are tested, to which the decision is adjusted.
    """
    unit = metric.unit or f"in {metric.title}"
    mean = f"{metric.format_difference(difference.mean)} {unit}"
    if difference.low is None or difference.high is None:
        return f"{model} against {first}: {mean} with one seed, which says nothing about noise: use more."
    low, high = metric.format_difference(difference.low), metric.format_difference(difference.high)
    interval = f"{CONFIDENCE:.0%} interval {low} to {high}, {seeds} seeds"
    if difference.within_noise:
        among = (
            "" if difference.low <= 0 <= difference.high else f" among {tests} tests, p = {difference.adjusted_p:.2g}"
        )
        return (
            f"{model} against {first}: {mean}, within noise{among} ({interval}): these runs do not tell the two apart."
        )
    word = "better" if metric.is_better(difference.mean, 0.0) else "worse"
    return f"{model} is {word} than {first} by {metric.format_spread(abs(difference.mean))} {unit} ({interval})."
