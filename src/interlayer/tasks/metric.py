"""How a number is named, compared and printed."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One metric of a task.

    Args:
        name: the key of rows and summaries: ``train_NAME``, ``eval_NAME``, ``test[NAME]``.
        higher_is_better: whether a higher value is the better one.
        percent: whether it is the fraction of images for which something holds, which is printed in percent; its
            differences are printed in points.
        label: what tables and curves call it; the name if empty.
    """

    name: str
    higher_is_better: bool = True
    percent: bool = False
    label: str = ""

    @property
    def title(self) -> str:
        return self.label or self.name.replace("_", " ")

    @property
    def unit(self) -> str:
        """The unit of differences; empty if they have none."""
        return "points" if self.percent else ""

    def format(self, value: float, *, short: bool = False) -> str:
        """Returns 84.03% or 0.1234, with a digit less if ``short``; an empty string for NaN."""
        if math.isnan(value):
            return ""
        return f"{value:.{1 if short else 2}%}" if self.percent else f"{value:.{3 if short else 4}f}"

    def format_spread(self, value: float) -> str:
        """Returns a distance without a sign and without a unit: 0.51 (points) or 0.0123."""
        return f"{value * 100:.2f}" if self.percent else f"{value:.4f}"

    def format_difference(self, value: float) -> str:
        """Returns a difference with its sign and without its unit: +0.51 (points) or -0.0123."""
        return f"{value * 100:+.2f}" if self.percent else f"{value:+.4f}"

    def is_better(self, value: float, than: float) -> bool:
        return value > than if self.higher_is_better else value < than

    def resolution(self, images: int) -> float:
        """Returns the smallest difference that an evaluation on this many images can show; 0 if there is none."""
        return 1 / images if self.percent else 0.0
