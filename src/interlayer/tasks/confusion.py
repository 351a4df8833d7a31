"""Which classes a classifier takes for which, for reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from .show import Matrix, Section, Table

MATRIX_CLASSES = 25  # maximum number of classes in a confusion matrix; a table of pairs is shown for more
SHOWN_PAIRS = 20  # maximum number of pairs in that table


def confusion_section(predictions: Tensor, classes: Sequence[str], *, title: str = "Confusion") -> Section:
    """Returns the confusion matrix or, for many classes, a table of the most frequent confusions.

    Args:
        predictions: index, true class and predicted class of each image, [N, 3].
        classes: the names of the classes.
        title: the title of the section.
    """
    labels, predicted, count = predictions[:, 1], predictions[:, 2], len(classes)
    if count <= MATRIX_CLASSES:
        counts = torch.bincount(labels * count + predicted, minlength=count * count).view(count, count)
        text = "The number of test images of each class by the predicted class, and their share of the true class."
        return Section(title, text, matrix=Matrix(list(classes), counts.tolist(), "true class", "predicted class"))
    wrong = labels != predicted
    pairs = Counter(zip(labels[wrong].tolist(), predicted[wrong].tolist(), strict=True))
    if not pairs:
        return Section(title, "None: every test image is classified correctly.")
    images = Counter(labels.tolist())
    rows = [
        [classes[label], classes[other], f"{number:,}", f"{number / images[label]:.1%}"]
        for (label, other), number in sorted(pairs.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_PAIRS]
    ]
    text = f"{int(wrong.sum()):,} of {len(labels):,} test images are taken for another of the {count:,} classes."
    if len(pairs) > SHOWN_PAIRS:
        text += f" The {SHOWN_PAIRS} most frequent of {len(pairs):,} pairs:"
    return Section(title, text, tables=[Table("", ["true class", "taken for", "images", "share of the class"], rows)])
