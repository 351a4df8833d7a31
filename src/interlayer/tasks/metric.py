"""The name, direction and format of a metric."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One metric of a task.

    Args:
        name: the key in rows and summaries: ``train_NAME``, ``eval_NAME``, ``test[NAME]``.
        higher_is_better: whether a higher value is better.
        percent: whether the metric is a fraction. Its values are printed as percentages and its differences as
            percentage points.
        label: the name in tables and curves; ``name`` if empty.
        counts_images: whether the metric is a fraction of the images, so that it changes by one image at least.
    """

    name: str
    higher_is_better: bool = True
    percent: bool = False
    label: str = ""
    counts_images: bool = False

    @property
    def title(self) -> str:
        """The name in tables and curves."""
        return self.label or self.name.replace("_", " ")

    @property
    def unit(self) -> str:
        """The unit of differences; an empty string if they have none."""
        return "points" if self.percent else ""

    def format(self, value: float | None, *, short: bool = False) -> str:
        """Formats a value as 84.03% or 0.1234, with one digit less if ``short``. NaN and None give an empty string."""
        if value is None or math.isnan(value):
            return ""
        return f"{value:.{1 if short else 2}%}" if self.percent else f"{value:.{3 if short else 4}f}"

    def format_spread(self, value: float) -> str:
        """Formats a standard deviation or an absolute difference without its unit: 0.51 (points) or 0.0123."""
        return f"{value * 100:.2f}" if self.percent else f"{value:.4f}"

    def format_difference(self, value: float) -> str:
        """Formats a difference with its sign and without its unit: +0.51 (points) or -0.0123."""
        return f"{value * 100:+.2f}" if self.percent else f"{value:+.4f}"

    def is_better(self, value: float, than: float) -> bool:
        """Whether ``value`` is better than ``than``."""
        return value > than if self.higher_is_better else value < than

    def resolution(self, images: int) -> float:
        """Returns the smallest difference that ``images`` images can show; 0 if there is no such limit."""
        return 1 / images if self.counts_images else 0.0
