"""The three splits of a dataset."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from .images import Images, Problems
from .streams import Stream


@dataclass
class Data:
    """The three splits of a dataset.

    Args:
        train: the training images.
        validation: held-out images that choose the best epoch; None if the test images are evaluated after every epoch.
        test: the test images.
        classes: class names, by label.
        problems: images that cannot be used.
        notes: messages to the user about how the data was split.
        labels: the classes of the network that have a folder, if class folders were matched with them; None otherwise.
    """

    train: Images | Stream
    validation: Images | Stream | None
    test: Images | Stream
    classes: list[str]
    problems: Problems
    notes: list[str] = field(default_factory=list)
    labels: list[int] | None = None


def cut(total: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits ``range(total)`` at random into ``total - count`` and ``count`` indices, equally for every seed."""
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0)).numpy()
    return np.sort(order[count:]), np.sort(order[:count])
