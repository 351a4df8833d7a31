"""The documents of the project as tests read them: headings, links and code blocks of README.md and docs/."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|(?:href|src)=\"([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    """A code block.

    Args:
        name: the document and the anchor of the heading above it, with a number from the second block of a section on:
            "docs/export.md#models-in-a-folder-or-on-the-hub:2".
        language: the language of the fence; empty for commands and sessions of Python.
        text: the code.
    """

    name: str
    language: str
    text: str


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    """Returns the text of a document without its code, whose brackets are no links."""
    return re.sub(r"`[^`\n]*`", "code", FENCE.sub("", text))


def anchor(heading: str) -> str:
    """Returns the anchor of a heading on GitHub."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def site_anchor(heading: str) -> str:
    """Returns the anchor of a heading in the site, which is Python-Markdown's."""
    return re.sub(r"-+", "-", anchor(heading)).strip("-")


def headings(text: str) -> list[str]:
    return HEADING.findall(FENCE.sub("", text))


def links(text: str) -> list[str]:
    """Returns the targets of the links and pictures of a document."""
    return [first or second for first, second in LINK.findall(without_code(text))]


def blocks(path: Path) -> list[Block]:
    """Returns the code blocks of a document."""
    text, found, counts = path.read_text(), [], {}
    for match in FENCE.finditer(text):
        above = headings(text[: match.start()])
        name = f"{name_of(path)}#{anchor(above[-1])}" if above else name_of(path)
        counts[name] = counts.get(name, 0) + 1
        found.append(Block(name if counts[name] == 1 else f"{name}:{counts[name]}", match[1], match[2]))
    return found


BLOCKS = {block.name: block for path in DOCUMENTS for block in blocks(path)}
