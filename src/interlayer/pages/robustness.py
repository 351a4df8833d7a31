"""The page of a robustness evaluation, a single file without external resources, and its figures as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from ..analysis.robustness import Perturbation, as_pictures
from ..analysis.robustness_plot import RobustnessPanel, plot_robustness
from ..experiments import Robustness, robustness_table, strength_sources
from ..experiments.robustness import Condition, Example
from ..tasks import Table
from ..training.files import write_json, write_text
from ..training.summary import versions
from .figures import Shown
from .rendering import COLOURS, jpeg, png, render, sentence_case, svg

SMALL = 64  # pixels: smaller images are not compressed


@dataclass(frozen=True)
class Sample:
    """A perturbed image on the page."""

    alt: str
    source: str
    caption: str


@dataclass(frozen=True)
class SampleRow:
    """The examples of a perturbation."""

    title: str
    samples: list[Sample]


@dataclass(frozen=True)
class RobustnessPage:
    """The contents of the page. `attacked` is the network that adversarial examples are made for; empty if none are."""

    title: str
    setting: str
    notes: list[str]
    bad_images: dict[str, str]
    table: Table
    figure: Shown | None
    rows: list[SampleRow]
    attacked: str
    sources: list[str]
    command: str
    versions: str


def write_robustness_page(result: Robustness, path: Path, *, command: str = "") -> None:
    """Writes the page, and the figures as JSON beside it, in a file of the same name.

    Args:
        result: the scores.
        path: the page, NAME.html.
        command: the command that measured the scores.
    """
    names = list(result.scores)
    page = RobustnessPage(
        title=f"Robustness of {' and '.join(names)}",
        setting=f"{result.data}, {result.images:,} images, seed {result.seed}.",
        notes=[sentence_case(f"{note}.") for note in result.notes],
        bad_images=dict(result.bad_images),
        table=robustness_table(result),
        figure=_figure(result),
        rows=_rows(result),
        attacked=names[0] if any(row.attacks for row in result.perturbations) else "",
        sources=strength_sources(result),
        command=command or "started from Python",
        versions=", ".join(f"{name} {version}" for name, version in versions().items()),
    )
    write_text(path, render("robustness", page=page))
    write_json(path.with_suffix(".json"), {"command": command, **result.as_dict()})


def _figure(result: Robustness) -> Shown | None:
    """Plots the metric by the strength of each perturbation; None if images are not perturbed."""
    if not result.perturbations:
        return None
    panels = [
        RobustnessPanel(
            row.title,
            row.unit,
            row.strengths,
            {name: [scores[Condition(row, s)] for s in row.strengths] for name, scores in result.scores.items()},
        )
        for row in result.perturbations
    ]
    unperturbed = {name: scores[Condition()] for name, scores in result.scores.items()}
    figure = plot_robustness(panels, unperturbed, result.metric, colors=COLOURS)
    return Shown(f"{sentence_case(result.metric.title)} by strength of each perturbation", svg(figure))


def _rows(result: Robustness) -> list[SampleRow]:
    """Returns the example without perturbation, and a row for each perturbation."""
    rows: dict[Perturbation | None, list[Sample]] = {}
    for example in result.examples:
        rows.setdefault(example.condition.perturbation, []).extend(_samples(example))
    return [
        SampleRow("No perturbation" if row is None else sentence_case(row.title), samples)
        for row, samples in rows.items()
    ]


def _samples(example: Example) -> list[Sample]:
    """Returns an example, and for attacks, which are hard to see, also the change that they make."""
    condition, row = example.condition, example.condition.perturbation
    name = f"{condition.title}, {condition.label}" if row is not None else "The image without perturbation"
    samples = [Sample(name, _source(example.image), condition.label)]
    if row is not None and row.attacks:
        change = example.image - example.original
        largest = change.abs().max().clamp_min(torch.finfo(change.dtype).tiny)
        magnified = 0.5 + 0.5 * change / largest
        samples.append(Sample(f"Change by {name}", _source(magnified), "its change, magnified"))
    return samples


def _source(image: Tensor) -> str:
    """Returns an image [3, H, W] with values from 0 to 1 as a data URI."""
    picture = Image.fromarray(as_pictures(image[None])[0].numpy())
    return png(picture) if max(picture.size) <= SMALL else jpeg(picture)
