"""The classes of a network, and how the names of class folders are matched with them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import resources

from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import nn

from ..files import TrainingError

IMAGENET_1K = 1000  # the number of its classes
BENCHMARKS = {  # test sets with some of ImageNet's classes, by timm's file of their WordNet ids
    "ImageNet-A": "imagenet_a_synsets.txt",
    "ImageNet-R": "imagenet_r_synsets.txt",
}


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
        synsets, lemmas = _synsets_and_lemmas(subset)
        count: dict[str, int] = {}
        for first, *_ in lemmas:
            count[first] = count.get(first, 0) + 1
        names = [
            first if count[first] == 1 else f"{first} ({synset})"
            for (first, *_), synset in zip(lemmas, synsets, strict=True)
        ]
        return cls(names, synsets, lemmas)

    @classmethod
    def of(cls, names: Sequence[str]) -> ClassNames:
        """Returns the classes of these names, with what is known about ImageNet-1k if they are its WordNet ids."""
        if len(names) == IMAGENET_1K:
            synsets, lemmas = _synsets_and_lemmas("imagenet-1k")
            if list(names) == synsets:
                return cls(synsets, synsets, lemmas)
        return cls(list(names))

    def __len__(self) -> int:
        return len(self.names)

    def match(self, folders: Sequence[str]) -> dict[str, int]:
        """Returns the label of each class folder whose name is a class.

        A name matches exactly, or else regardless of case and punctuation if only one class has it. ImageNet's classes
        are also matched by WordNet id and by any lemma, and those of ImageNet-1k by number if no folder is matched
        otherwise, as in ImageNet-V2.

        Raises:
            TrainingError: if the folders are numbers, and one is no class of ImageNet-1k.
        """
        exact = {name: label for label, name in enumerate(self.names)}
        synsets = {name: label for label, name in enumerate(self.synsets)}
        similar = self._similar_names()
        found = {}
        for folder in folders:
            label = exact.get(folder, synsets.get(folder[:9], similar.get(_normalized(folder), -1)))
            if label >= 0:
                found[folder] = label
        if not found and self.is_imagenet_1k:
            return {folder: _class_number(folder) for folder in folders if folder.isdecimal()}
        return found

    def label(self, text: str) -> int:
        """Returns the label of a class, given its name as for `match`, or its number.

        Raises:
            TrainingError: there is no such class. The message lists the nearest names.
        """
        if text.isdecimal() and text not in self.names and int(text) < len(self):
            return int(text)
        found = self.match([text]) if not text.isdecimal() or text in self.names else {}
        if text in found:
            return found[text]
        known = {name.casefold(): name for name in (*self.names, *(name for names in self.lemmas for name in names))}
        near = [known[name] for name in get_close_matches(text.casefold(), known, n=3)]
        if not near:  # part of a name, or else any
            near = [name for key, name in known.items() if text.casefold() in key][:3] or self.names[:3]
        numbers = f"or a number from 0 to {len(self) - 1}"
        raise TrainingError(
            f"{text!r} is no class of the network: expected a class such as {', '.join(near)}, {numbers}"
        )

    @property
    def is_imagenet_1k(self) -> bool:
        """Whether the classes are those of ImageNet-1k, in their usual order."""
        return len(self.synsets) == IMAGENET_1K

    def benchmark(self, labels: Collection[int]) -> str | None:
        """Returns the test set that has exactly these classes: "ImageNet-A" or "ImageNet-R"; None if there is none."""
        if not self.synsets:
            return None
        present = {self.synsets[label] for label in labels}
        info = resources.files("timm.data").joinpath("_info")
        return next(
            (name for name, file in BENCHMARKS.items() if present == set(info.joinpath(file).read_text().split())), None
        )

    def _similar_names(self) -> dict[str, int]:
        """Returns the label of every normalized name that only one class has; -1 for the others."""
        similar: dict[str, int] = {}
        lemmas: Iterable[list[str]] = self.lemmas or ([] for _ in self.names)
        for label, (name, further) in enumerate(zip(self.names, lemmas, strict=True)):
            for key in {_normalized(text) for text in (name, *further, ", ".join(further)) if text}:
                similar[key] = -1 if key in similar else label
        return similar


def _synsets_and_lemmas(subset: str) -> tuple[list[str], list[list[str]]]:
    """Returns the WordNet id and the names of each class of one of timm's subsets of ImageNet, by label."""
    info = ImageNetInfo(subset)
    lemmas = [[lemma.strip() for lemma in text.split(",")] for text in info.label_descriptions()]
    return list(info.label_names()), lemmas


def _class_number(folder: str) -> int:
    if int(folder) >= IMAGENET_1K:
        raise TrainingError(f"the class folder {folder} is no class number of ImageNet-1k: expected 0 to 999")
    return int(folder)


def _normalized(name: str) -> str:
    return re.sub(r"[\W_]+", " ", name).strip().casefold()
