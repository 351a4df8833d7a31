"""Numbers and names in sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# The end of the name of an annotation, of which a file or an image has several
ANNOTATION = re.compile(r" (object|annotation|category) (at position )?\d+( \(again\))?$")


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


def unusable_count(names: Iterable[str]) -> str:
    """Returns how many images and annotations have these names.

    >>> unusable_count(["a.png", "b.xml object 3", "b.xml object 7"])
    '1 image and 2 annotations'
    """
    names = list(names)
    annotations = sum(ANNOTATION.search(name) is not None for name in names)
    counts = {"image": len(names) - annotations, "annotation": annotations}
    return listing([plural(count, noun) for noun, count in counts.items() if count])
