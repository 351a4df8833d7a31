"""The output of a task as plain values. Pages lay them out and the command line prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from PIL import Image
from torch import Tensor

MIN_SCORE = 0.5  # of the objects in pictures and tables, unless another score is given
SHOWN_ROWS = 6  # number of rows of pictures in a section


class ImageSource(Protocol):
    """Images that can be opened one by one, with their targets."""

    def name(self, index: int) -> str: ...

    def open(self, index: int) -> Image.Image: ...

    def target(self, index: int) -> Any: ...


@dataclass(frozen=True)
class FinishedRun:
    """The contents of the folder of a finished run.

    Args:
        model: name of the network.
        summary: the contents of summary.json.
        records: the tensors in predictions.safetensors, which the task's evaluator recorded for each test image.
    """

    model: str
    summary: Mapping[str, Any]
    records: Mapping[str, Tensor]


@dataclass(frozen=True)
class Table:
    """A table of text cells."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


@dataclass(frozen=True)
class Span:
    """A piece of a line.

    Args:
        text: the text.
        tone: the style: plain, strong (the truth), good (a correct answer) or bad (a wrong answer).
        key: if given, the text is preceded by a marker in the color of the section's ``keys[key]``.
    """

    text: str
    tone: Literal["", "strong", "good", "bad"] = ""
    key: int | None = None


@dataclass(frozen=True)
class Picture:
    """An image with a caption of one or more lines."""

    image: Image.Image
    alt: str
    lines: list[list[Span]]


@dataclass(frozen=True)
class Matrix:
    """Counts of images by two classes.

    Args:
        classes: the names of the rows and of the columns.
        counts: the number of images of each row and column.
        rows, columns: what the rows and the columns are.
    """

    classes: list[str]
    counts: list[list[int]]
    rows: str
    columns: str


@dataclass(frozen=True)
class Line:
    """A line of a plot.

    Args:
        name: the name in the legend.
        x, y: the coordinates of its points.
        color: the color, as #RRGGBB; the one of the network with the index of the line if empty.
    """

    name: str
    x: list[float]
    y: list[float]
    color: str = ""


@dataclass(frozen=True)
class Plot:
    """Lines over a horizontal axis, both axes from 0 to 1.

    Args:
        title: a description of the plot.
        x, y: the names of the axes.
        lines: the lines, in the order of the legend.
    """

    title: str
    x: str
    y: str
    lines: list[Line]


@dataclass(frozen=True)
class Section:
    """A titled section of a report.

    Args:
        title: the title.
        text: a paragraph below the title.
        keys: names of the colored markers in the captions, in the order of the legend.
        legend: text after the keys in the legend.
        tables: tables below the legend.
        pictures: pictures below the tables.
        matrix: counts by two classes, which are drawn as a heatmap below the text.
        plot: lines, which are drawn below the text.
        swatches: names and colors (as #RRGGBB) of classes, which are listed below the legend.
        rows: large pictures below the others. Those of a row belong together and stand side by side if there is room.
    """

    title: str
    text: str = ""
    keys: list[str] = field(default_factory=list)
    legend: str = ""
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    matrix: Matrix | None = None
    plot: Plot | None = None
    swatches: list[tuple[str, str]] = field(default_factory=list)
    rows: list[list[Picture]] = field(default_factory=list)


def spread(total: int, wanted: int) -> list[int]:
    """Returns up to ``wanted`` indices, evenly spaced in ``range(total)``."""
    count = min(total, wanted)
    return [i * total // count for i in range(count)]


def thumbnail(images: ImageSource, index: int, lines: Sequence[Sequence[Span]], size: int = 160) -> Picture:
    """Opens an image and reduces it to at most ``size`` pixels in height and width."""
    image = images.open(index)
    image.thumbnail((size, size), Image.Resampling.LANCZOS)
    return Picture(image, images.name(index), [list(line) for line in lines])
