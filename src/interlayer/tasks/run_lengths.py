"""Masks as run lengths, in the two forms of COCO: a list of counts, or the same counts as text.

The pixels of a mask [H, W] are read column by column. The counts are the lengths of its runs, in turn of pixels outside
and inside the object, and their sum is H W. In the text, each count from the third on is replaced by its difference
from the count before the last, and stored in groups of five bits, the lowest first, each as a character from "0" on. A
sixth bit says that more groups follow, and the highest bit of the last group is the sign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


class MaskError(ValueError):
    """Raised if a mask does not fit its image. The message says why, as a sentence about the mask."""


@dataclass(frozen=True)
class RunLengths:
    """A mask as run lengths.

    Args:
        counts: the lengths of the runs, the first of pixels outside the object.
        height, width: the size of the mask.
    """

    counts: tuple[int, ...]
    height: int
    width: int

    @classmethod
    def of(cls, segmentation: Mapping[str, Any], height: int, width: int) -> RunLengths:
        """Reads COCO's {size, counts} of an object in an image of the given size.

        Raises:
            MaskError: if the size is another one, or the counts do not fill it.
        """
        size = segmentation.get("size")
        counts: Any = segmentation.get("counts")
        if not isinstance(size, Sequence) or list(size) != [height, width]:
            raise MaskError(f"its RLE has the size {size}, expected {[height, width]}, that of its image")
        if isinstance(counts, (str, bytes)):
            counts = counts_of_text(counts)
        whole = isinstance(counts, Sequence) and all(type(count) is int and count >= 0 for count in counts)
        if not whole:
            raise MaskError("its RLE has counts that are no list of whole numbers")
        if sum(counts) != height * width:
            raise MaskError(
                f"its RLE does not fit: its counts add up to {sum(counts):,}, expected {height} x {width} = "
                f"{height * width:,} pixels"
            )
        return cls(tuple(counts), height, width)

    @classmethod
    def encode(cls, mask: np.ndarray) -> RunLengths:
        """Returns the run lengths of a mask, booleans [H, W]."""
        height, width = mask.shape
        pixels = mask.astype(bool).T.ravel()
        edges = np.flatnonzero(pixels[1:] != pixels[:-1]) + 1
        counts = np.diff([0, *edges.tolist(), pixels.size]).tolist()
        return cls((0, *counts) if pixels.size and pixels[0] else tuple(counts), height, width)

    def as_dict(self) -> dict[str, Any]:
        """Returns COCO's {size, counts} with compressed counts, as JSON-serializable values."""
        return {"size": [self.height, self.width], "counts": text_of_counts(self.counts)}

    @property
    def area(self) -> int:
        """The number of pixels of the object."""
        return sum(self.counts[1::2])

    def decode(self) -> np.ndarray:
        """Returns the mask, booleans [H, W]."""
        inside = np.arange(len(self.counts)) % 2 == 1
        return np.repeat(inside, self.counts).reshape(self.width, self.height).T


def counts_of_text(text: str | bytes) -> list[int]:
    """Returns the counts that COCO's compressed text holds. Raises a `MaskError` if the text is not of this form."""
    codes = text.encode("ascii", "replace") if isinstance(text, str) else text
    counts: list[int] = []
    value = shift = 0
    for code in codes:
        group = code - 48
        if not 0 <= group < 64 or shift > 60:
            raise MaskError(f"its RLE has the character {chr(code)!r}, which compressed counts do not have")
        value |= (group & 0x1F) << shift
        shift += 5
        if group & 0x20:
            continue
        if group & 0x10:
            value -= 1 << shift
        if len(counts) > 2:
            value += counts[-2]
        counts.append(value)
        value = shift = 0
    if shift:
        raise MaskError("its RLE ends within a count")
    if any(count < 0 for count in counts):
        raise MaskError("its RLE does not fit: it has a negative count")
    return counts


def text_of_counts(counts: Sequence[int]) -> str:
    """Returns counts as COCO's compressed text, which `counts_of_text` reads."""
    codes: list[int] = []
    for index, count in enumerate(counts):
        value = count - counts[index - 2] if index > 2 else count
        more = True
        while more:
            group = value & 0x1F
            value >>= 5
            more = value != (-1 if group & 0x10 else 0)  # the rest is more than the sign
            codes.append(48 + group + (0x20 if more else 0))
    return bytes(codes).decode("ascii")
