"""The interface between a task and everything that trains, compares and reports.

A task says what is built from the values of a recipe, how samples become a batch, its loss with named scalars, its
metrics and which of them is the headline, and what there is to show. Training, comparison and reports move names and
numbers and know no task. A task works with plain values only: it imports neither training nor pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..models.build import build_network
from .evaluator import Evaluator, Scores
from .metric import Metric
from .show import FinishedRun, ImageSource, Section, Table

NETWORK_KEYS = (  # the values of a recipe that the builder of networks takes under the same names
    "pretrained", "image_size", "drop_rate", "drop_path_rate", "model_options", "attach_options", "weights",
    "zero_head", "batch_norm_momentum",
)  # fmt: skip


class TaskError(ValueError):
    """The task cannot be done as it is asked for; the message says why and what to change."""


class Task(ABC):
    """One kind of training problem.

    Args:
        values: all values of the recipe, by key.
        classes: names of the data's classes, by label.

    Attributes:
        name: the value of the recipe's key ``task``.
        headline: the metric that chooses the best epoch and that a comparison is about; one of `eval_metrics`.
        train_metrics: the named scalars of the loss, logged as ``train_NAME`` beside ``train_loss``.
        eval_metrics: the metrics of an evaluation, logged as ``eval_NAME`` beside ``eval_loss``.
    """

    name: ClassVar[str]
    headline: ClassVar[Metric]
    train_metrics: ClassVar[tuple[Metric, ...]] = ()
    eval_metrics: ClassVar[tuple[Metric, ...]]

    def __init__(self, values: Mapping[str, Any], classes: Sequence[str]) -> None:
        self.values, self.classes = values, list(classes)

    # The network

    @abstractmethod
    def build(self) -> nn.Module:
        """Builds the network that the values describe."""

    def build_network(self, num_classes: int) -> nn.Module:
        """Builds the network that the recipe names, with ``num_classes`` outputs."""
        if not self.values["model"]:
            raise TaskError("the recipe names no model: give --model NAME, or NAME+MECHANISM to attach one")
        options = {key: self.values[key] for key in NETWORK_KEYS if key in self.values}
        return build_network(self.values["model"], num_classes=num_classes, **options)

    # A batch

    def collate(self, samples: Sequence[tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
        """Makes a batch of samples: images [B, 3, H, W], bytes, and their targets."""
        images, targets = zip(*samples, strict=True)
        return torch.stack(images), self.collate_targets(targets)

    def collate_targets(self, targets: Sequence[Any]) -> Any:
        """Makes one value of the targets of several images; a tensor whose first dimension is the image, if it can.

        The default takes labels, as every source of images has them, and returns them as int64 [B].
        """
        return torch.as_tensor(targets, dtype=torch.int64)

    def mixable(self, targets: Any) -> Tensor:
        """Returns targets as a float tensor [B, K], which Mixup and CutMix average; `loss` takes the average."""
        raise TaskError(f"task={self.name} cannot mix images: set mixup=0 and cutmix=0")

    # Training and evaluation

    def forward(self, model: Any, images: Tensor, targets: Any = None) -> Any:
        """Runs the model, under autocast where the recipe asks for it.

        Args:
            images: [B, 3, H, W], normalized.
            targets: given in training, for models that compute their loss themselves.
        """
        return model(images)

    @abstractmethod
    def loss(self, outputs: Any, targets: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the loss of a batch.

        Args:
            outputs: what `forward` returned, in the precision of autocast.
            targets: as `collate_targets` made them, or as `mixable` did where the batch was mixed.

        Returns:
            The mean loss, and for every one of `train_metrics` its total over the images of the batch, detached. The
            trainer adds totals up and divides by the number of images: whole numbers stay exact.
        """

    @abstractmethod
    def evaluator(self, *, records: bool = False) -> Evaluator:
        """Makes an empty evaluator.

        Args:
            records: whether it also keeps what was predicted for each image.
        """

    def summary(self) -> dict[str, Any]:
        """Returns the task's own entries of a run's summary, as JSON can hold them.

        They include ``classes``, from which the task of a finished run is made again.
        """
        return {"classes": self.classes}

    # What there is to show

    def predictions(self, outputs: Any, top: int) -> list[dict[str, Any]]:
        """Describes what the network sees in each image of a batch, as JSON can hold it.

        Args:
            outputs: what `forward` returned.
            top: how many answers to give for an image, where there are several.
        """
        raise TaskError(f"task={self.name} does not describe predictions of single images")

    def show_predictions(self, found: Sequence[Mapping[str, Any]]) -> Table:
        """Lays out predictions, each with the entry ``image`` added, as one table."""
        raise TaskError(f"task={self.name} does not describe predictions of single images")

    def details(self, scores: Scores) -> dict[str, Any]:
        """Returns what more can be said of an evaluation that kept records, as JSON can hold it."""
        return {}

    def show_details(self, evaluation: Mapping[str, Any]) -> list[Table]:
        """Lays out an evaluation (its metrics, ``loss``, ``images`` and `details`) as tables."""
        metrics = [metric for metric in self.eval_metrics if metric.name in evaluation]
        columns = ["images", *(metric.title for metric in metrics), "loss"]
        row = [
            f"{evaluation['images']:,}", *(metric.format(evaluation[metric.name]) for metric in metrics),
            f"{evaluation['loss']:.4f}",
        ]  # fmt: skip
        return [Table(f"{evaluation['model']} on {evaluation['data']}", columns, [row])]

    def show_run(self, run: FinishedRun, images: ImageSource | None) -> list[Section]:
        """Returns what a report of one run shows beside its metrics.

        Args:
            images: the test images; None where they cannot be opened one by one.
        """
        return []

    def show_comparison(self, runs: Sequence[FinishedRun], images: ImageSource | None) -> list[Section]:
        """Returns what a report of a comparison shows beside its metrics.

        Args:
            runs: one run of each network, all of the same seed.
            images: the test images; None where they cannot be opened one by one.
        """
        return []
