"""The page of an inspection: what can be seen inside networks, in a single file without external resources."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ..analysis import count_flops, count_parameters
from ..analysis.class_activation_plot import percent
from ..experiments import LoadedNetwork, ShownImages
from ..hosts import attached_mechanisms
from ..tasks import Classification, Table
from ..training.files import make_folder, write_text
from ..training.summary import versions
from .figures import Shown
from .inspected import FIGURES, PICTURES, InspectedFigure, Subject
from .readings import READINGS, Reading
from .rendering import jpeg, png, render, sentence

DOTS_PER_INCH = 150
PIXELS_PER_INCH = 96  # of a web page
SMALL = 64  # pixels: smaller images are not compressed


@dataclass(frozen=True)
class InspectedImage:
    """An image on the page, with what each network predicts."""

    name: str
    source: str
    lines: list[str]


@dataclass(frozen=True)
class InspectedSection:
    """The figures of one kind."""

    reading: Reading
    figures: list[Shown]
    remarks: list[str]


@dataclass(frozen=True)
class InspectionPage:
    """The contents of the page. What does not apply is listed by its reason, which several figures can share."""

    title: str
    setting: str
    notes: list[str]
    bad_images: dict[str, str]
    table: Table
    images: list[InspectedImage]
    sections: list[InspectedSection]
    left_out: dict[str, list[str]]
    command: str
    versions: str


def write_inspection(
    networks: Mapping[str, LoadedNetwork],
    images: Mapping[str, ShownImages],
    path: Path,
    *,
    command: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Writes a page with everything that applies to the networks, and its figures as PNG files beside it.

    Nothing is written before all figures are drawn.

    Args:
        networks: the networks, by name. They are shown side by side.
        images: the images of each network, by its name.
        path: the page, NAME.html. The figures are written into the folder NAME_figures.
        command: the command that made the page.
        progress: a function that is called with the number of figures that are done, and the number of all.

    Returns:
        The files that were written.
    """
    subjects = {name: Subject(loaded, images[name]) for name, loaded in networks.items()}
    sections: list[InspectedSection] = []
    left_out: dict[str, list[str]] = {}
    pictures: dict[str, bytes] = {}
    for done, figure in enumerate(FIGURES, 1):
        section, drawn, reasons = _section(figure, subjects)
        if section is None:
            left_out.setdefault("; ".join(reasons), []).append(READINGS[figure.name].title)
        else:
            sections.append(section)
            pictures |= drawn
        if progress is not None:
            progress(done, len(FIGURES))
    first = next(iter(images.values()))
    count = f"{len(first):,} images" if len(first) > 1 else first.names[0]
    names = {name: name.removesuffix(", untrained") for name in networks}
    random = [names[name] for name, loaded in networks.items() if not loaded.has_weights]
    page = InspectionPage(
        title=f"Inside {' and '.join(names.values())}",
        setting=sentence(f"measured with {count}"),
        notes=[f"{name} has random weights: its figures say nothing about a trained network." for name in random],
        bad_images={},
        table=_table(subjects),
        images=_images(subjects),
        sections=sections,
        left_out=left_out,
        command=command or "started from Python",
        versions=", ".join(f"{name} {version}" for name, version in versions().items()),
    )
    text = render("inspector", page=page)
    folder = path.with_name(f"{path.stem}_figures")
    make_folder(folder)
    files = []
    for name, content in pictures.items():
        files.append(folder / f"{name}.png")
        files[-1].write_bytes(content)
    write_text(path, text)
    return [path, *files]


def _section(
    figure: InspectedFigure, subjects: Mapping[str, Subject]
) -> tuple[InspectedSection | None, dict[str, bytes], list[str]]:
    """Returns the section of a figure, its pictures by file name, and why it does not apply to some networks."""
    found, reasons = {}, []
    for name, subject in subjects.items():
        try:
            found[name] = figure.measure(subject)
        except ValueError as error:
            reasons.append(f"{name}: {error}" if len(subjects) > 1 else str(error))
    if not any(found.values()):
        return None, {}, reasons
    figures = figure.plot(found)
    names = [figure.name] if len(figures) == 1 else [f"{figure.name}_{number}" for number in range(1, len(figures) + 1)]
    pictures = {name: _png(drawn) for name, drawn in zip(names, figures, strict=True)}
    reading = READINGS[figure.name]
    shown = [_shown(reading.title, content) for content in pictures.values()]
    return InspectedSection(reading, shown, reasons), pictures, reasons


def _shown(title: str, content: bytes) -> Shown:
    """Returns a figure at the size that it has on paper: its pixels are finer than those of most screens."""
    width = Image.open(io.BytesIO(content)).width
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return Shown(title, source, round(width * PIXELS_PER_INCH / DOTS_PER_INCH))


def _png(figure: object) -> bytes:
    buffer = io.BytesIO()
    figure.draw_without_rendering()  # type: ignore[attr-defined]  # a constrained layout needs to be computed twice
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH)  # type: ignore[attr-defined]
    return buffer.getvalue()


def _table(subjects: Mapping[str, Subject]) -> Table:
    rows = []
    for name, subject in subjects.items():
        loaded = subject.loaded
        kinds = dict.fromkeys(type(module).__name__ for module in attached_mechanisms(loaded.network).values())
        size = subject.images.inputs.shape[-1]
        flops = (
            count_flops(loaded.network, image_size=size, convention="torch")
            if loaded.task.annotations == "labels"
            else None
        )
        rows.append(
            [
                name,
                ", ".join(kinds) or "none",
                f"{count_parameters(loaded.network):,}",
                "" if flops is None else f"{flops / 1e9:.3f} G",
                f"{size} x {size}",
                "trained" if loaded.has_weights else "random",
            ]
        )
    return Table("Networks", ["", "mechanisms", "parameters", "multiply-adds", "image", "weights"], rows)


def _images(subjects: Mapping[str, Subject]) -> list[InspectedImage]:
    """Returns some images with what each network predicts."""
    first = next(iter(subjects.values())).images
    lines: list[list[str]] = [[] for _ in first.names[:PICTURES]]
    for name, subject in subjects.items():
        task, network = subject.loaded.task, subject.loaded.network
        if not isinstance(task, Classification):
            continue
        outputs = task.forward(network, subject.images.inputs[:PICTURES], None)
        for texts, found in zip(lines, task.predictions(outputs.detach(), 1), strict=True):
            best = found["classes"][0]
            texts.append(f"{name}: {best['class']} {percent(best['probability'])}")
    pictures = [Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in first.pictures[:PICTURES].cpu()]
    return [
        InspectedImage(Path(name).name, png(picture) if max(picture.size) <= SMALL else jpeg(picture), texts)
        for name, picture, texts in zip(first.names, pictures, lines, strict=False)
    ]
