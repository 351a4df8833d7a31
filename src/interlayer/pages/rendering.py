"""Renders pages from templates. Each page is a single file without external resources.

Templates and style sheets are in templates/. Jinja2 escapes all values, because names of classes and files can contain
any characters.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from ..training.wording import unusable_count

COLOURS = ("#3b6ea8", "#c8553d", "#4a8f5b", "#8a63a8", "#b58a2b", "#4b9c9c")
COMMON_STYLE = "report.css"
LISTED = 10  # number of bad images listed on a page; summary.json lists all of them


def colour(index: int) -> str:
    """Returns the color of the network with this index, in curves and legends."""
    return COLOURS[index % len(COLOURS)]


def render(name: str, **values: Any) -> str:
    """Renders the template ``name.html`` with the style sheet that all pages share and with ``name.css``."""
    sheets = dict.fromkeys((COMMON_STYLE, f"{name}.css"))
    style = Markup("".join(_template(sheet) for sheet in sheets))  # trusted: files of this package
    return _environment().get_template(f"{name}.html").render(style=style, **values)


def svg(figure: Any) -> str:
    """Returns a matplotlib figure as a data URI."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def png(image: Image.Image) -> str:
    """Returns a PIL image as a data URI."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def jpeg(image: Image.Image) -> str:
    """Returns a PIL image as a data URI. A photograph takes a tenth of the bytes of a PNG."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG", quality=85, subsampling=0)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def sentence_case(text: str) -> str:
    """Capitalizes the first letter, unless the second one is a capital, as in mIoU."""
    return text if text[1:2].isupper() else text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    """Capitalizes the first letter and adds a full stop."""
    return f"{sentence_case(text)}."


def unbroken(text: str) -> str:
    """Keeps the text of a cell together, so that a table that is too wide breaks it only before a bracket, or "to"."""
    kept = text.replace(" ", "\N{NO-BREAK SPACE}")
    return kept.replace("\N{NO-BREAK SPACE}(", " (") if "(" in text else kept.replace("\N{NO-BREAK SPACE}to", " to")


def listed(found: Mapping[str, str]) -> str:
    """Lists the first bad images with the reasons."""
    return "; ".join(f"{name}: {reason}" for name, reason in list(found.items())[:LISTED])


def _template(name: str) -> str:
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_template),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        colour=colour, png=png, jpeg=jpeg, sentence=sentence, listed=listed, unbroken=unbroken,
        unusable_count=unusable_count,
    )  # fmt: skip
    return environment
