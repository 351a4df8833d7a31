"""Writes docs/results.md from results/, and takes comparisons over into results/: `make results`.

    python docs/write_results.py                     # the page
    python docs/write_results.py add rla runs/rla    # the runs of this comparison, finished or not, and the page

results/CLAIM/claim.yaml states a claim and the commands that test it. `add` copies what the page needs of a comparison:
recipe.yaml, networks.json, and the metrics.csv and summary.json of every run; no weights and no images. Folders of data
and of weights become those of the claim. Several comparisons can be added to one claim, and the same one again when it
has gone on. The page is computed from these files by `interlayer.experiments`; overview.md is its first section.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from statistics import fmean, stdev

import claims as stored
from claims import Claim, Plan

from interlayer.experiments import Comparison, Result, comparison_table, finished_runs, read_comparison, run_folder
from interlayer.tasks import task_class
from interlayer.training.files import write_text
from interlayer.training.logs import read_metrics
from interlayer.training.recipe import read_recipe
from interlayer.training.summary import read_summary
from interlayer.training.wording import listing, plural

PAGE = Path(__file__).with_name("results.md")
COLUMNS = ("difference (95% interval)", "its network over this control")  # of the table: differences that are tested
LEFT_OUT = "MFLOPs"
FINDINGS = {
    "shown": "shown",
    "not shown": "not shown",
    "something else": "shown to be something else",
    "undecided": "not decided",
}
PIECE = "--budget 10m"


@dataclass(frozen=True)
class State:
    """What is known of one comparison.

    Args:
        plan: the comparison.
        comparison: the comparison of its finished runs; None before a run of the first network is finished.
        missing: the seeds that each network still needs.
        seconds: the time of the device that its runs took, finished or not.
        devices: the devices of the finished runs.
    """

    plan: Plan
    comparison: Comparison | None
    missing: Mapping[str, list[int]]
    seconds: float
    devices: list[str]

    @property
    def started(self) -> bool:
        return self.seconds > 0

    def finding(self, name: str) -> str:
        """Returns what the runs say about a network, in words."""
        results: list[Result] = [] if self.comparison is None else self.comparison.results
        found = next((result for result in results if result.model == name), None)
        return "open" if found is None or self.comparison is None else FINDINGS[self.comparison.finding(found)]

    @property
    def finished(self) -> int:
        return len(self.plan.models) * len(self.plan.seeds) - sum(map(len, self.missing.values()))


def state_of(plan: Plan) -> State:
    """Reads what was added of a comparison."""
    record = plan.record
    if record is None:
        return State(plan, None, dict.fromkeys(plan.models, plan.seeds), 0.0, [])
    record = replace(record, models=plan.models)  # networks that were added to the claim later are still to be run
    runs = finished_runs(record, plan.folder)
    missing = {name: [seed for seed in plan.seeds if seed not in found] for name, found in runs.items()}
    comparison = None
    if runs[plan.models[0]]:
        comparison = read_comparison(plan.folder, recipe=read_recipe(plan.folder / "recipe.yaml"), record=record)
        comparison = replace(comparison, folder=plan.output)  # what it advises is about the reader's folder
    rows = [row for path in plan.folder.glob("*/seed*/metrics.csv") for row in read_metrics(path.parent)]
    seconds = sum(row["seconds"] + row["eval_seconds"] for row in rows) / record.shared
    devices = {read_summary(path)["device"] for found in runs.values() for path in found.values()}
    return State(plan, comparison, {n: seeds for n, seeds in missing.items() if seeds}, seconds, sorted(devices))


def verdict(claim: Claim, states: Sequence[State]) -> str:
    """Returns the verdict on a claim, in words without a full stop."""
    if not any(state.comparison for state in states):
        return "open"
    if claim.verdict:
        return claim.verdict.removesuffix(".")
    several = len(states) > 1
    words = [
        f"`{name}`{f' ({state.plan.name})' if several else ''}: {state.finding(name)}"
        for state in states
        for name in claim.claimed
    ]
    if not words:
        return "not decided"
    return "; ".join(words) + (", so far" if any(state.missing for state in states) else "")


def schedule(claim: Claim, epochs: int | None = None) -> str:
    """Returns the epochs as a part of the paper's."""
    epochs = epochs or claim.epochs
    if claim.paper_epochs is None:
        return plural(epochs, "epoch")
    part = Fraction(epochs, claim.paper_epochs)
    share = f"{part.numerator}/{part.denominator}" if part.denominator <= 10 else f"{float(part):.2f}"
    return f"{epochs} of {claim.paper_epochs} epochs ({share})"


def duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def table(state: State) -> str:
    """Returns the table of a comparison in Markdown. Differences that exceed the noise are bold."""
    comparison = state.comparison
    assert comparison is not None
    shown = comparison_table(comparison, over_controls=True)
    bold = {each.network.name: not each.difference.within_noise for r in comparison.results for each in r.controls}
    controlled = any(result.controls for result in comparison.results)
    dropped = {LEFT_OUT} | (set() if controlled else {COLUMNS[1]})
    further = further_metrics(state)
    rows = [[*(c for c in [*shown.columns[:2], *further, *shown.columns[2:]] if c not in dropped), "seeds", "schedule"]]
    for result, row in zip(comparison.results, shown.rows, strict=True):
        cells = dict(zip(shown.columns, row, strict=True))
        control, _, name = cells["network"].rpartition(" ")
        cells["network"] = f"{control} `{name}`".strip()
        own = result.difference is not None and not result.control_of and not result.difference.within_noise
        for column, clear in zip(COLUMNS, (own, bold.get(result.model, False)), strict=True):
            cells[column] = f"**{cells[column]}**" if clear else cells[column]
        wanted = [seed for seed in state.plan.seeds if seed not in result.seeds]
        seeds = f"{len(result.seeds)} of {len(result.seeds) + len(wanted)}"
        kept = [text for column, text in cells.items() if column not in dropped]
        kept[2:2] = [found[result.model] for found in further.values()]
        rows.append([*kept, seeds, schedule(state.plan.claim, result.cost.epochs)])
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([lines[0], "| " + " | ".join(["---"] * len(rows[0])) + " |", *lines[1:]])


def further_metrics(state: State) -> dict[str, dict[str, str]]:
    """Returns the metrics that the claim shows beside the one that is compared: by title, of each network, in words."""
    plan, comparison = state.plan, state.comparison
    assert comparison is not None
    by_name = {metric.name: metric for metric in task_class(plan.recipe.task).eval_metrics}
    found: dict[str, dict[str, str]] = {}
    for metric in (by_name[name] for name in plan.claim.metrics):
        found[metric.title] = {}
        for result in comparison.results:
            summaries = [read_summary(run_folder(plan.folder, result.model, seed)) for seed in result.seeds]
            values = [summary["test"][metric.name] for summary in summaries]
            spread = f" ± {metric.format_spread(stdev(values))}" if len(values) > 1 else ""
            found[metric.title][result.model] = f"{metric.format(fmean(values))}{spread}"
    return found


def paragraph(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False)


def commands(lines: Sequence[str]) -> str:
    return "```\n" + "\n".join(lines) + "\n```"


def section(claim: Claim, states: Sequence[State]) -> str:
    """Returns the section of a claim: verdict, tables, and the commands that were run or are open."""
    parts = [
        f"### {claim.title}",
        paragraph(f"{claim.claim} ({claim.paper})"),
        paragraph(f"Schedule: {schedule(claim)}. {claim.schedule}"),
        paragraph(f"**Verdict: {verdict(claim, states)}.**"),
        *([paragraph(f"Why: {claim.why}")] if claim.why else []),
    ]
    for state in states:
        parts += [f"`{state.plan.name}`:"] if len(states) > 1 and state.comparison else []
        if state.comparison is not None:
            lines = [line for text in state.comparison.verdicts() for line in text.splitlines()]
            parts += [table(state), *(["\n".join(f"- {line}" for line in lines)] if lines else [])]
    seconds, devices = sum(state.seconds for state in states), sorted({d for state in states for d in state.devices})
    if seconds:
        on = f" on {listing(devices)}" if devices else ""
        parts.append(f"Training and evaluation took about {duration(seconds)}{on}.")
    ran = [state.plan.command for state in states if state.started]
    parts += [commands([*ran, *claim.figures])] if ran else []
    return "\n\n".join([*parts, *_open(states)])


def _open(states: Sequence[State]) -> list[str]:
    """Returns what is still to be run, with the commands that do it."""
    wanted = [state for state in states if state.missing]
    if not wanted:
        return []
    goes_on = [f"{state.plan.command} {PIECE}" if not state.started else _going_on(state) for state in wanted]
    missing: list[str] = []
    for state in wanted:
        if state.started:
            where = f" in {state.plan.name}" if len(states) > 1 else ""
            missing += [f"`{n}`{where} (seed {', '.join(map(str, seeds))})" for n, seeds in state.missing.items()]
        else:
            networks = listing([f"`{name}`" for name in state.plan.models])
            missing.append(f"{state.plan.name}, {plural(len(state.plan.seeds), 'seed')} each of {networks}")
    return [paragraph(f"Open: {'; '.join(missing)}."), commands(goes_on)]


def _going_on(state: State) -> str:
    """Returns the command that runs the missing seeds, in a new folder as well as in that of the stopped comparison."""
    from interlayer_cli.compare import seeds_text

    missing = sorted({seed for seeds in state.missing.values() for seed in seeds})
    command = re.sub(r"--seeds \S+", f"--seeds {seeds_text(missing)}", state.plan.command)
    return f"{command} --resume {PIECE}"


def overview(claims: Sequence[tuple[Claim, Sequence[State]]]) -> str:
    """Returns a table with a row for each claim."""
    rows = ["| claim | paper | runs | schedule | device time | verdict |", "| --- | --- | --- | --- | --- | --- |"]
    for claim, states in claims:
        done = sum(state.finished for state in states)
        total = sum(len(plan.models) * len(plan.seeds) for plan in claim.plans)
        seconds = sum(state.seconds for state in states)
        cells = [
            claim.title, claim.paper, f"{done} of {total}", schedule(claim), duration(seconds) if seconds else "",
            verdict(claim, states),
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def page() -> str:
    """Returns the text of docs/results.md."""
    first = (stored.RESULTS / "overview.md").read_text().replace("](../docs/", "](").rstrip()
    claims = [(claim, [state_of(plan) for plan in claim.plans]) for claim in stored.read_claims()]
    head = paragraph(
        "What each mechanism adds, measured on real images. The papers' schedules of classification are shortened to a "
        "fifth or more of their length; those of detection and segmentation are not the papers'. This part of the page "
        "is written by `make results` from the folder `results`, which holds the recipe and the metrics of every run."
    )
    reading = paragraph(
        "*Shown*: the network is better than the plain one and than each of its [controls](controls.md). *Shown to be "
        "something else*: it is better than the plain one, but not than a control, which lacks only what the mechanism "
        "is credited with, and the interval excludes that all of the gain is from there. *Not shown*: it is not better "
        "than the plain one beyond the noise. *Not decided*: one seed, "
        "or too few runs to tell. Differences are paired by seed, with 95% intervals; **bold** ones exceed the noise "
        "after Holm's correction for all differences of the comparison ([Statistics](training.md#statistics)). Change "
        "of blocks: how much of the outputs of its blocks is the mechanism's; switched off: accuracy without it; in "
        "brackets behind training and memory: compared with the first network."
    )
    parts = [
        first,
        "## Claims of the papers",
        head,
        overview(claims),
        reading,
        *(section(claim, states) for claim, states in claims),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes docs/results.md from results/.")
    actions = parser.add_subparsers(dest="action", metavar="add")
    adding = actions.add_parser("add", help="take a comparison over into results/, finished or not")
    adding.add_argument("claim", help="the name of a folder of results/")
    adding.add_argument("folder", type=Path, help="the folder of the comparison")
    arguments = parser.parse_args()
    try:
        if arguments.action == "add":
            known = {claim.id: claim for claim in stored.read_claims()}
            if arguments.claim not in known:
                raise ValueError(f"no such claim: {arguments.claim}; expected one of {', '.join(known)}")
            print(stored.add(known[arguments.claim], arguments.folder))
        write_text(PAGE, page())
    except ValueError as error:
        print(f"write_results: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
