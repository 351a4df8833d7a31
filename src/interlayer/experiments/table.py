"""The table of a comparison as plain values, for the command line and for reports."""

from __future__ import annotations

import math

from ..tasks import Table
from ..training.wording import plural
from .results import Comparison
from .statistics import CONFIDENCE

OVER_CONTROLS = 3  # the place of the column of differences to controls: beside the one to the first network


def network_titles(comparison: Comparison) -> list[str]:
    """Returns the names of the networks. A control is named by what it differs in from the network before it."""
    titles = {each.network.name: each.name for result in comparison.results for each in result.controls}
    return [  # a control that has no seed in common with its network has no difference to it yet
        f"control {titles.get(result.model, result.model)}" if result.control_of else result.model
        for result in comparison.results
    ]


def comparison_rows(comparison: Comparison) -> list[list[str]]:
    """Returns one row of cells for each network, without its name."""
    metric, first = comparison.metric, comparison.results[0].cost
    return [
        [
            metric.format(result.mean)
            + ("" if math.isnan(result.spread) else f" ± {metric.format_spread(result.spread)}"),
            result.difference.format(metric) if result.difference is not None else "",
            "" if result.contribution is None else result.contribution.range,
            "" if result.contribution is None else metric.format(result.contribution.value_without),
            f"{result.cost.parameters:,}",
            f"{result.cost.flops / 1e6:,.1f}",
            f"{result.cost.epochs} x {result.cost.epoch_seconds:.2f} s"
            + _ratio(result.cost.training_seconds, first.training_seconds),
            f"{result.cost.memory / 2**20:,.0f} MiB" + _ratio(result.cost.memory, first.memory),
        ]
        for result in comparison.results
    ]


def _ratio(value: float, first: float) -> str:
    return f" ({value / first:.2f}x)" if first and value != first else ""


def comparison_table(comparison: Comparison, *, corner: str = "network", over_controls: bool = False) -> Table:
    """Returns a table with the metric, the contribution of the mechanism and the cost of every network.

    Args:
        corner: the title of the column of network names.
        over_controls: whether a column shows, in the row of a control, the difference of its network to it.
    """
    columns = [
        corner, comparison.metric.title, f"difference ({CONFIDENCE:.0%} interval)", "change of blocks",
        "switched off", "parameters", "MFLOPs", "training", "memory",
    ]  # fmt: skip
    titles = network_titles(comparison)
    rows = [[title, *cells] for title, cells in zip(titles, comparison_rows(comparison), strict=True)]
    if over_controls:
        over = {
            each.network.name: each.difference.format(comparison.metric)
            for result in comparison.results
            for each in result.controls
        }
        columns.insert(OVER_CONTROLS, "its network over this control")
        for row, result in zip(rows, comparison.results, strict=True):
            row.insert(OVER_CONTROLS, over.get(result.model, ""))
    return Table("", columns, rows, note=_note(comparison))


def _note(comparison: Comparison) -> str:
    """Explains the columns of the table."""
    metric = comparison.metric
    unit = f", in {metric.unit}" if metric.unit else ""
    seconds = "median seconds" if comparison.together == 1 else "seconds, measured alone before the runs"
    equal = ", as many as fit into the time of the slowest network" if comparison.equal_time else ""
    tests = len(comparison.tested)
    most = max(len(result.seeds) for result in comparison.results)
    seeds = f"{'up to ' if comparison.unfinished else ''}{plural(most, 'seed')}"
    adjusted = f", each by itself; decisions are adjusted to {tests} tests (Holm)" if tests > 1 else ""
    return (
        f"{metric.title} on the test images, mean ± standard deviation over {seeds}; difference "
        f"to {comparison.results[0].model} pair by pair{unit}{adjusted}; change of blocks: how much of the outputs of "
        f"its blocks is the mechanism's; switched off: {metric.title} without the mechanism; MFLOPs: multiply-adds of "
        f"one image; training: epochs{equal} x {seconds}; memory: peak of a training step of one run, "
        f"with SGD; (1.20x): compared with {comparison.results[0].model}; the interval is about seeds, not about other "
        f"test images"
    )
