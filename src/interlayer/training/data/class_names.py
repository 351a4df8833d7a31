"""The classes of a network, and how the names of class folders are matched with them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import nn


@dataclass(frozen=True)
class ClassNames:
    """The names of the classes of a network.

    Args:
        names: the name of each class, by label.
        synsets: the WordNet id of each class, by label; empty if the classes are not those of ImageNet.
        lemmas: further names of each class, by label.
    """

    names: list[str]
    synsets: list[str] = field(default_factory=list)
    lemmas: list[list[str]] = field(default_factory=list)

    @classmethod
    def imagenet(cls, network: nn.Module) -> ClassNames | None:
        """Returns the classes of a network for ImageNet-1k, 12k, 21k or 22k; None for any other number of classes.

        timm knows the set by the number of classes. A class is named by its first lemma, such as "tench", together with
        its WordNet id if several classes have that lemma.
        """
        subset = infer_imagenet_subset(network)
        if subset is None:
            return None
        info = ImageNetInfo(subset)
        synsets = list(info.label_names())
        lemmas = [[lemma.strip() for lemma in text.split(",")] for text in info.label_descriptions()]
        count: dict[str, int] = {}
        for first, *_ in lemmas:
            count[first] = count.get(first, 0) + 1
        names = [
            first if count[first] == 1 else f"{first} ({synset})"
            for (first, *_), synset in zip(lemmas, synsets, strict=True)
        ]
        return cls(names, synsets, lemmas)

    def __len__(self) -> int:
        return len(self.names)

    def match(self, folders: Sequence[str]) -> dict[str, int]:
        """Returns the label of each class folder whose name is a class.

        A name matches exactly, or else regardless of case and punctuation if only one class has it. ImageNet's classes
        are also matched by WordNet id, by any lemma, and by number if all folders are numbers.
        """
        exact = {name: label for label, name in enumerate(self.names)}
        synsets = {name: label for label, name in enumerate(self.synsets)}
        similar = self._similar_names()
        found = {}
        for folder in folders:
            label = exact.get(folder, synsets.get(folder[:9], similar.get(_normalized(folder), -1)))
            if label >= 0:
                found[folder] = label
        if not found and self.synsets and all(folder.isdecimal() and int(folder) < len(self) for folder in folders):
            return {folder: int(folder) for folder in folders}
        return found

    def _similar_names(self) -> dict[str, int]:
        """Returns the label of every normalized name that only one class has; -1 for the others."""
        similar: dict[str, int] = {}
        lemmas: Iterable[list[str]] = self.lemmas or ([] for _ in self.names)
        for label, (name, further) in enumerate(zip(self.names, lemmas, strict=True)):
            for key in {_normalized(text) for text in (name, *further, ", ".join(further)) if text}:
                similar[key] = -1 if key in similar else label
        return similar


def _normalized(name: str) -> str:
    return re.sub(r"[\W_]+", " ", name).strip().casefold()
