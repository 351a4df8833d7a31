"""What a comparison says about controls: whether a gain comes from what the mechanism is credited with.

A network N with a mechanism, its plain network P and a control C (see `interlayer.models.names.control_networks`) give
two differences, N - P and N - C, both paired by seed. N - P is what the mechanism gains with everything that it brings
along; N - C is the part of it that comes from what is tested. The upper end of the interval of N - C bounds that part
from above, even if the difference is within noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..models.names import ControlNetwork
from ..tasks import Metric
from .statistics import Difference

Finding = Literal["shown", "not shown", "something else", "undecided"]


@dataclass(frozen=True)
class ControlDifference:
    """The difference of a network to one of its controls.

    Args:
        network: the control.
        difference: the network's value minus that of the control.
    """

    network: ControlNetwork
    difference: Difference

    @property
    def name(self) -> str:
        """The mechanism with the options of its control: mrla_light:attention=false."""
        options = ",".join(f"{key}={str(value).lower()}" for key, value in self.network.control.options.items())
        return f"{self.network.mechanism}:{options}"

    def sentence(self, gain: Difference | None, first: str, metric: Metric) -> str:
        """Returns how the network compares with the control, and what this says about its gain.

        Args:
            gain: the difference of the network to the plain network; None if there is none.
            first: the name of the plain network.
            metric: the metric of the values.
        """
        unit = f" {metric.unit}" if metric.unit else ""
        text = f"Over its control {self.name} ({self.network.control.left}): {self.difference.format(metric)}{unit}"
        if self.difference.low is None or self.difference.high is None:
            return f"{text} with one seed, which says nothing about noise."
        if gain is None:
            return f"{text}: {self._effect(metric, unit)}."
        if gain.within_noise or not metric.is_better(gain.mean, 0.0):
            return f"{text}: {self._effect(metric, unit, first)}."
        return f"{text}: {self._part_of(gain, metric, unit)}."

    def most(self, metric: Metric) -> float:
        """Returns the upper bound of what is from the tested part: the end of the interval; infinity for one seed."""
        end = self.difference.high if metric.higher_is_better else self.difference.low
        return math.inf if end is None else end if metric.higher_is_better else -end

    def _part_of(self, gain: Difference, metric: Metric, unit: str) -> str:
        """Says how much of a gain comes from what is tested."""
        difference, tested = self.difference, self.network.control.tested
        mean, total = metric.format_spread(abs(difference.mean)), metric.format_spread(abs(gain.mean))
        if difference.within_noise:
            most = self.most(metric)
            if most >= abs(gain.mean):
                return f"these runs do not tell whether the gain is from {tested}"
            bound = f", at most {metric.format_spread(most)} of {total}{unit} are" if most > 0 else ""
            return f"the gain is not shown to be from {tested}{bound}"
        if not metric.is_better(difference.mean, 0.0):
            return f"the gain is not from {tested}, which costs {mean}{unit}"
        if abs(difference.mean) >= abs(gain.mean):
            return f"the gain is from {tested}"
        return f"{mean} of the {total}{unit} are from {tested}"

    def _effect(self, metric: Metric, unit: str, first: str = "") -> str:
        """Says what the tested part does in a network that is not shown to be better than the plain one.

        ``first`` is the name of the plain one; it is empty if the network is not compared with it.
        """
        difference, tested = self.difference, self.network.control.tested
        if difference.within_noise:
            return f"these runs show no effect of {tested}"
        mean = f"{metric.format_spread(abs(difference.mean))}{unit}"
        if metric.is_better(difference.mean, 0.0):
            return f"{tested} gains {mean}" + (
                f", although the network is not shown to be better than {first}" if first else ""
            )
        return f"{tested} costs {mean}"


def finding(
    gain: Difference, controls: Sequence[ControlDifference], metric: Metric, *, complete: bool = True
) -> Finding:
    """Returns what differences say about the claim that a mechanism helps by what it is credited with.

    - "shown": the network is better than the plain one, and than each of its controls.
    - "something else": it is better than the plain one, but not shown to be better than a control, which lacks only
      what the mechanism is credited with, and the interval of this difference excludes that all of the gain is from
      there.
    - "not shown": it is not shown to be better than the plain one.
    - "undecided": there is a single seed; or it is better than the plain one, and a control is not there or tells
      nothing because its interval contains all of the gain.

    Args:
        gain: the difference of the network to the plain one.
        controls: its differences to its controls; none if the plain network is its control.
        metric: the metric of the values.
        complete: whether all of its controls are there.
    """

    def better(difference: Difference) -> bool:
        return not difference.within_noise and metric.is_better(difference.mean, 0.0)

    if gain.low is None:
        return "undecided"
    if not better(gain):
        return "not shown"
    others = [each for each in controls if not better(each.difference)]
    if any(each.most(metric) < abs(gain.mean) for each in others):
        return "something else"
    return "shown" if complete and not others else "undecided"
