"""The table of a comparison as plain values, for the command line and for reports."""

from __future__ import annotations

import math

from ..tasks import Table
from .compare import Comparison
from .statistics import CONFIDENCE


def comparison_rows(comparison: Comparison) -> list[list[str]]:
    """Returns one row of cells for each network, without its name."""
    metric = comparison.metric
    return [
        [
            metric.format(result.mean)
            + ("" if math.isnan(result.spread) else f" ± {metric.format_spread(result.spread)}"),
            result.difference.format(metric) if result.difference is not None else "",
            f"{result.cost.parameters:,}",
            f"{result.cost.flops / 1e6:,.1f}",
            f"{result.cost.epoch_seconds:.2f} s",
            f"{result.cost.memory / 2**20:,.0f} MiB",
        ]
        for result in comparison.results
    ]


def comparison_table(comparison: Comparison, *, corner: str = "network") -> Table:
    """Returns a table with the metric and the cost of every network.

    Args:
        corner: the title of the column of network names.
    """
    columns = [
        corner, comparison.metric.title, f"difference ({CONFIDENCE:.0%} interval)", "parameters", "MFLOPs", "epoch",
        "memory",
    ]  # fmt: skip
    rows = [
        [result.model, *cells] for result, cells in zip(comparison.results, comparison_rows(comparison), strict=True)
    ]
    return Table("", columns, rows, note=_note(comparison))


def _note(comparison: Comparison) -> str:
    """Explains the columns of the table."""
    metric = comparison.metric
    unit = f", in {metric.unit}" if metric.unit else ""
    shared = f", {comparison.together} runs sharing the GPU" if comparison.together > 1 else ""
    return (
        f"{metric.title} on the test images, mean ± standard deviation over {len(comparison.seeds)} seeds; difference "
        f"to {comparison.results[0].model} pair by pair{unit}; MFLOPs: multiply-adds of one image; epoch: median "
        f"seconds of training{shared}; memory: peak of a training step of one run, with SGD; the interval is about "
        f"seeds, not about other test images"
    )
