"""What a class activation map explains: the score of a class for an image, or for the pixels of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ClassTarget:
    """A class of one image.

    Args:
        label: the class.
        region: of a segmenter, the pixels that are predicted as the class, [H, W]; None of a classifier.
    """

    label: int
    region: Tensor | None = None

    def score(self, logits: Tensor) -> Tensor:
        """Returns the logit of the class, [N], or the sum of the logits over the pixels of the region.

        Args:
            logits: [N, classes], or [N, classes, H, W] of a segmenter.
        """
        chosen = logits[:, self.label]
        return chosen if self.region is None else (chosen * self.region).sum((1, 2))

    def probability(self, logits: Tensor) -> Tensor:
        """Returns the probability of the class, [N], or its mean over the pixels of the region.

        It is the softmax of the logits, or the sigmoid if there is a single one.
        """
        logits = logits.float()
        every = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(1)
        chosen = every[:, self.label]
        return chosen if self.region is None else (chosen * self.region).sum((1, 2)) / self.region.sum()


def logits_of(model: nn.Module, outputs: Any, images: int) -> Tensor:
    """Returns the logits in the outputs of a classifier or of a segmenter.

    Args:
        model: the network, for messages.
        outputs: a tensor, a record of transformers with ``logits``, or a dict of torchvision's segmenters with ``out``.
        images: the number of images.

    Raises:
        ValueError: the outputs are something else, as those of a detector are.
    """
    logits = getattr(outputs, "logits", outputs)
    if isinstance(logits, Mapping) and isinstance(logits.get("out"), Tensor):
        logits = logits["out"]
    if not isinstance(logits, Tensor) or logits.dim() not in (2, 4) or len(logits) != images:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"class activation needs a classifier or a segmenter, which return logits [B, classes] or "
            f"[B, classes, H, W]; {type(model).__name__} returns {shape}, and detectors are not supported"
        )
    if not logits.isfinite().all():
        raise ValueError(f"the logits of {type(model).__name__} for these images are not finite")
    return logits


def choose_targets(logits: Tensor, targets: int | Sequence[int] | Tensor | None) -> list[ClassTarget]:
    """Returns the class of each image that is explained.

    Args:
        logits: [B, classes], or [B, classes, H, W] of a segmenter.
        targets: one class for all images, or one for each; None for the predicted ones, which for a segmenter are those
            that have the most pixels.

    Raises:
        ValueError: there is no such class, or no pixel is predicted as that class.
    """
    count, classes = logits.shape[:2]
    predicted = logits.argmax(1)  # [B], or [B, H, W]
    if targets is None:
        labels = predicted.flatten(1).mode(1).values.tolist() if logits.dim() == 4 else predicted.tolist()
    elif isinstance(targets, int):
        labels = [targets] * count
    else:
        labels = [int(label) for label in targets]
    if len(labels) != count:
        raise ValueError(f"expected a target for each of {count} images, got {len(labels)}")
    for label in labels:
        if not 0 <= label < classes:
            raise ValueError(f"target {label} is no class of the network: expected 0 to {classes - 1}")
    if logits.dim() == 2:
        return [ClassTarget(label) for label in labels]
    chosen = []
    for index, (label, pixels) in enumerate(zip(labels, predicted, strict=True)):
        if not (pixels == label).any():
            present = ", ".join(str(each) for each in torch.unique(pixels).tolist())
            raise ValueError(f"no pixel of image {index} is predicted as class {label}: its classes are {present}")
        chosen.append(ClassTarget(label, pixels == label))
    return chosen
