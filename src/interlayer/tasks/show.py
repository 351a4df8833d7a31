"""What a task shows, as plain values: pages lay them out and the command line prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from PIL import Image
from torch import Tensor


class ImageSource(Protocol):
    """Images that can be opened one by one."""

    def name(self, index: int) -> str: ...

    def open(self, index: int) -> Image.Image: ...


@dataclass(frozen=True)
class FinishedRun:
    """What the folder of a finished run holds.

    Args:
        model: name of the network.
        summary: the contents of summary.json.
        records: the tensors of predictions.safetensors: what the task's evaluator kept for each test image.
    """

    model: str
    summary: Mapping[str, Any]
    records: Mapping[str, Tensor]


@dataclass(frozen=True)
class Table:
    """Cells as text; numbers are right-aligned by whoever lays the table out."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


@dataclass(frozen=True)
class Span:
    """A piece of a line.

    Args:
        tone: how it reads: plain, strong (the truth), good (right) or bad (wrong).
        key: where given, a mark in the colour of the section's entry ``keys[key]`` comes before the text.
    """

    text: str
    tone: Literal["", "strong", "good", "bad"] = ""
    key: int | None = None


@dataclass(frozen=True)
class Picture:
    """An image with a caption of several lines."""

    image: Image.Image
    alt: str
    lines: list[list[Span]]


@dataclass(frozen=True)
class Section:
    """A titled section of a report.

    Args:
        text: a paragraph under the title.
        keys: names of the coloured marks that captions use, in order: the legend.
        legend: what follows the keys in the legend.
    """

    title: str
    text: str = ""
    keys: list[str] = field(default_factory=list)
    legend: str = ""
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)


def spread(total: int, wanted: int) -> list[int]:
    """Returns up to ``wanted`` indices, spread evenly over ``total``."""
    count = min(total, wanted)
    return [i * total // count for i in range(count)]


def thumbnail(images: ImageSource, index: int, lines: Sequence[Sequence[Span]], size: int = 160) -> Picture:
    """Opens one image, reduced to at most ``size`` pixels."""
    image = images.open(index)
    image.thumbnail((size, size), Image.Resampling.LANCZOS)
    return Picture(image, images.name(index), [list(line) for line in lines])
