"""The table of a robustness evaluation as plain values, for the command line and for pages."""

from __future__ import annotations

from ..analysis.robustness import PERTURBATIONS, PerturbedScore
from ..tasks import Metric, Table
from .robustness import Robustness
from .statistics import CONFIDENCE, paired_difference


def robustness_table(result: Robustness) -> Table:
    """Returns a table with a row for each condition and a column for each network, as Table 9 of CB.

    From the second network on, a column follows with the difference to the first one, repetition by repetition.
    """
    first, *others = result.scores
    columns = ["perturbation", "strength", "runs", first]
    for name in others:
        columns += [name, "difference"]
    rows = []
    for condition in result.conditions:
        baseline = result.scores[first][condition]
        row = [condition.title, condition.label, f"{len(baseline.values)}", _cell(baseline, result.metric)]
        for name in others:
            score = result.scores[name][condition]
            difference = paired_difference(baseline.values, score.values)
            row += [_cell(score, result.metric), difference.format(result.metric)]
        rows.append(row)
    return Table("", columns, rows, note=_note(result))


def _cell(score: PerturbedScore, metric: Metric) -> str:
    """Formats a mean and its interval: 40.22% ± 0.15."""
    width = "" if score.half_width is None else f" ± {metric.format_spread(score.half_width)}"
    return metric.format(score.mean) + width


def _note(result: Robustness) -> str:
    """Explains the columns of the table."""
    repeated = any(condition.repeats(2) > 1 for condition in result.conditions) and result.repeats > 1
    random = (
        f"what is random is run {result.repeats} times, mean ± half of its {CONFIDENCE:.0%} interval; "
        f"what is not random is run once; the interval is about random numbers, not about other images"
        if repeated
        else "nothing is repeated"
    )
    unit = f", in {result.metric.unit}" if result.metric.unit else ""
    difference = f"; difference to {next(iter(result.scores))}{unit}" if len(result.scores) > 1 else ""
    return f"{result.metric.title} on {result.images:,} images; {random}{difference}"


def strength_sources(result: Robustness) -> list[str]:
    """Returns whose strengths the perturbations have."""
    return [
        f"{row.title}: {row.source if row.strengths == PERTURBATIONS[row.name].strengths else 'given by the user'}"
        for row in result.perturbations
    ]
