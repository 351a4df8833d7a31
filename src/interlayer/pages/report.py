"""The report of a run or of a comparison, report.html, which is a single file without external resources.

It contains the table of results, training curves, the contribution of mechanisms, heatmaps of attention scores between
layers, the sections of the task, the command, the versions and the recipe. Everything is read from the folders of the
runs, so that a report can be written again at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ..experiments import Comparison, comparison_table, read_run, task_of
from ..experiments.table import network_titles
from ..tasks import Section, Table
from ..training import Recipe
from ..training.data import Images, open_data
from ..training.files import write_text
from ..training.recipe import read_recipe
from ..training.summary import read_contribution
from ..training.wording import plural
from .figures import Attention, MechanismEffect, Shown, attention, confusion, contributions, costs, curves, plot
from .rendering import render, sentence_case


@dataclass(frozen=True)
class Report:
    """The contents of a report."""

    title: str
    heading: str
    setting: str
    notes: list[str]
    bad_images: Mapping[str, str]
    table: Table
    curves: list[Shown]
    contributions: list[MechanismEffect]
    attention: list[Attention]
    sections: list[Section]
    command: str
    versions: str
    recipe: str
    verdicts: list[str] = field(default_factory=list)
    costs: Shown | None = None

    @cached_property
    def matrices(self) -> list[Shown | None]:
        """The figure of each section's matrix, or None."""
        return [None if section.matrix is None else confusion(section.matrix) for section in self.sections]

    @cached_property
    def plots(self) -> list[Shown | None]:
        """The figure of each section's plot, or None."""
        return [None if section.plot is None else plot(section.plot) for section in self.sections]


def write_comparison_report(comparison: Comparison) -> Path:
    """Writes the report of a comparison into its folder."""
    names = [result.model for result in comparison.results]
    folders = {result.model: result.folders for result in comparison.results}
    asked = {result.model: result.folders for result in comparison.results if not result.control_of}
    runs = [read_run(paths[0]) for paths in asked.values()]
    recipe, summary = read_recipe(comparison.results[0].folders[0] / "recipe.yaml"), runs[0].summary
    task, images = task_of(recipe, summary.get("classes", [])), _test_images(recipe)
    records = {result.model: result.contribution for result in comparison.results}
    title, titles = f"{sentence_case(comparison.metric.title)} and cost", network_titles(comparison)
    report = Report(
        title=f"Comparison: {', '.join(names)}",
        heading=f"{' or '.join(asked)}?",
        setting=f"{_setting(comparison.recipe)}, {plural(len(comparison.seeds), 'seed')} each.",
        verdicts=comparison.verdicts(),
        notes=comparison.notes,
        bad_images=summary["bad_images"],
        table=replace(comparison_table(comparison, corner=""), title=title),
        costs=costs(comparison),
        curves=curves(task, dict(zip(titles, folders.values(), strict=True))),
        contributions=contributions(dict(zip(titles, records.values(), strict=True))),
        attention=attention(asked, records, images),
        sections=task.show_comparison(runs, images),
        command=comparison.command or "started from Python",
        versions=_versions(summary["versions"]),
        recipe=comparison.recipe.replace(model=", ".join(names)).to_yaml(),
    )
    return _write(comparison.folder, report)


def write_run_report(folder: Path) -> Path:
    """Writes the report of a single finished run into its folder."""
    recipe, run = read_recipe(folder / "recipe.yaml"), read_run(folder)
    summary, test = run.summary, run.summary["test"]
    task, images = task_of(recipe, summary.get("classes", [])), _test_images(recipe)
    metrics = [metric for metric in task.eval_metrics if metric.name in test]
    table = Table(
        "Result",
        [
            "", *(f"test {metric.title}" if metric == task.headline else metric.title for metric in metrics),
            *(["test loss"] if "loss" in test else []), "images", "epoch tested", "training time",
        ],
        [[
            recipe.model, *(metric.format(test[metric.name]) for metric in metrics),
            *([f"{test['loss']:.4f}"] if "loss" in test else []), f"{test['images']:,}",
            f"{summary['chosen_epoch']} ({summary['chosen_by']})",
            _duration(summary["seconds"]),
        ]],
    )  # fmt: skip
    records = {recipe.model: read_contribution(summary)}
    heading = f"{recipe.model}: {task.headline.format(test[task.headline.name])}"
    report = Report(
        title=heading,
        heading=heading,
        setting=f"{_setting(recipe)}, seed {recipe.seed}, on {summary['device']}.",
        notes=summary["notes"],
        bad_images=summary["bad_images"],
        table=table,
        curves=curves(task, {recipe.model: [folder]}),
        contributions=contributions(records),
        attention=attention({recipe.model: [folder]}, records, images),
        sections=task.show_run(run, images),
        command=summary["command"] or "started from Python",
        versions=_versions(summary["versions"]),
        recipe=recipe.to_yaml(),
    )
    return _write(folder, report)


def _write(folder: Path, report: Report) -> Path:
    path = folder / "report.html"
    write_text(path, render("report", page=report))
    return path


def _test_images(recipe: Recipe) -> Images | None:
    """Opens the test images, if they can be opened by index. Training has already reported unreadable images."""
    test = open_data(recipe.replace(on_bad_image="skip")).test
    return test if isinstance(test, Images) else None


def _setting(recipe: Recipe) -> str:
    return (
        f"{recipe.data}, {recipe.epochs} epochs, batch {recipe.batch_size}, {recipe.optimizer} with learning rate "
        f"{recipe.scaled_lr:g}, {recipe.schedule} schedule, {recipe.precision}"
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
