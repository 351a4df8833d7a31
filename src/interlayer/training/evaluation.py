"""How well a network does on a set of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.checkpoints import write_tensors
from .data import BatchTransform, EvalBatches
from .files import TrainingError


@dataclass(frozen=True)
class Scores:
    """Scores over `count` images, and, where asked for, what was predicted for each.

    Args:
        predictions: [N, 3], by place in the source: place, label, predicted class.
        confidences: [N], the probability of the predicted class.
    """

    loss: float
    accuracy: float
    top5: float
    count: int
    predictions: Tensor | None = None
    confidences: Tensor | None = None

    @classmethod
    def none(cls) -> Scores:
        return cls(float("nan"), float("nan"), float("nan"), 0)

    def save_predictions(self, path: Path) -> None:
        if self.predictions is not None and self.confidences is not None:
            write_tensors({"predictions": self.predictions, "confidences": self.confidences}, path)


def evaluate_batches(
    model: Callable[[Tensor], Tensor],
    batches: EvalBatches,
    batch_transform: BatchTransform,
    autocast: Callable[[], AbstractContextManager[Any]],
    classes: int,
    accelerator: Any = None,
    *,
    predictions: bool = False,
) -> Iterator[Scores]:
    """Run a network, in eval mode, over batches; yields after each (without scores), and last the scores.

    A generator, so that several runs can take turns; sums stay on the device until the end.
    """
    sums: Tensor | None = None
    kept: list[tuple[Tensor, Tensor]] = []
    for pixels, labels, places in batches:
        with torch.no_grad():
            with autocast():
                logits = model(batch_transform.normalize(pixels))
            logits = logits.float()
            counts = places >= 0
            losses = F.cross_entropy(logits, labels, reduction="none") * counts
            best = logits.topk(min(5, classes), dim=1).indices
            hits = (best == labels[:, None]) & counts[:, None]
            part = torch.stack([losses.double().sum(), hits[:, 0].sum(), hits.sum(), counts.sum()]).double()
            sums = part if sums is None else sums + part
            if predictions:
                kept.append((torch.stack([places, labels, best[:, 0]], 1), logits.softmax(1).amax(1)))
        yield Scores.none()
    if sums is None:
        raise TrainingError("there is no image to evaluate on")
    rows = torch.cat([row for row, _ in kept]) if kept else None
    confidences = torch.cat([confidence for _, confidence in kept]) if kept else None
    if accelerator is not None and accelerator.num_processes > 1:
        sums = accelerator.reduce(sums)
        if rows is not None:
            rows, confidences = (
                accelerator.gather(accelerator.pad_across_processes(part, pad_index=-1)) for part in (rows, confidences)
            )
    if rows is not None and confidences is not None:
        order = torch.argsort(rows[:, 0])
        order = order[rows[order, 0] >= 0]
        rows, confidences = rows[order].cpu(), confidences[order].cpu()
    loss, first, any_of_five, count = sums.tolist()
    if not count:
        raise TrainingError("none of the images to evaluate on can be read")
    yield Scores(loss / count, first / count, any_of_five / count, int(count), rows, confidences)
