"""Numbers and names in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def listing(items: Sequence[str]) -> str:
    """Returns the items as in a sentence.

    >>> listing(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def plural(count: float, noun: str, nouns: str = "") -> str:
    """Returns a number with its noun, in the plural unless it is one.

    >>> plural(1, "class", "classes"), plural(1200, "image")
    ('1 class', '1,200 images')
    """
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun if count == 1 else nouns or f'{noun}s'}"
