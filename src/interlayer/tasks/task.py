"""The interface between a task and the code that trains, compares and reports.

A task defines the network that is built from a recipe, how samples are collated, the loss and its named scalars, the
metrics and the headline metric, and the contents of reports. Training, comparison and reports handle names and numbers
and do not depend on any particular task. A task uses plain values only: it imports neither training nor pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from ..models.build import build_network
from .evaluator import Evaluator, MeanEvaluator, Scores
from .metric import Metric
from .show import MIN_SCORE, FinishedRun, ImageSource, Section, Table

NETWORK_KEYS = (  # the values of a recipe that are passed to `build_network`
    "pretrained", "image_size", "drop_rate", "drop_path_rate", "model_options", "attach_options", "weights",
    "zero_head", "batch_norm_momentum",
)  # fmt: skip


class TaskError(ValueError):
    """Raised if a task does not support a request. The message says why and what to change."""


class Task(ABC):
    """Base class of tasks.

    Args:
        values: all values of the recipe, by key.
        classes: class names of the data, by label.

    Attributes:
        name: the value of ``task`` in a recipe.
        headline: the metric that chooses the best epoch and that comparisons report; one of `eval_metrics`.
        train_metrics: the named scalars of the loss, logged as ``train_NAME`` next to ``train_loss``.
        eval_metrics: the metrics of an evaluation, logged as ``eval_NAME`` next to ``eval_loss``.
        annotations: what the data has for each image: "labels", "boxes", "masks" (of objects) or "label_maps".
        evaluates_loss: whether evaluations compute a loss. If not, ``eval_loss`` is left out of logs and summaries.
        draws: whether predictions are places in an image, which `draw` shows and `coco_results` lists.
    """

    name: ClassVar[str]
    headline: ClassVar[Metric]
    train_metrics: ClassVar[tuple[Metric, ...]] = ()
    eval_metrics: tuple[Metric, ...]
    annotations: ClassVar[Literal["labels", "boxes", "masks", "label_maps"]] = "labels"
    evaluates_loss: ClassVar[bool] = True
    draws: ClassVar[bool] = False

    def __init__(self, values: Mapping[str, Any], classes: Sequence[str]) -> None:
        self.values, self.classes = values, list(classes)

    @classmethod
    def unsupported_reason(cls, values: Mapping[str, Any]) -> str:
        """Returns which values of a recipe the task does not support and what to set instead; empty if it does."""
        if values["crop"] == "jittered":
            return f"crop=jittered is for tasks with boxes or masks, not for task={cls.name}: set crop=resized"
        if values["vertical_flip"]:
            return f"vertical_flip is for tasks with boxes or masks, not for task={cls.name}: set vertical_flip=0"
        return ""

    # The network

    @abstractmethod
    def build(self) -> nn.Module:
        """Builds the network of the recipe."""

    def build_network(self, num_classes: int) -> nn.Module:
        """Builds the network that the recipe names, with ``num_classes`` outputs."""
        if not self.values["model"]:
            raise TaskError("the recipe names no model: give --model NAME, or NAME+MECHANISM to attach one")
        options = {key: self.values[key] for key in NETWORK_KEYS if key in self.values}
        return build_network(self.values["model"], num_classes=num_classes, **options)

    def backbone(self, network: nn.Module) -> nn.Module:
        """Returns the module of a network that holds the backbone and has its ``pretrained_cfg``.

        It takes normalized images [B, 3, H, W]. The default is the network itself.
        """
        return network

    @property
    def image_size(self) -> int | None:
        """The height and width of the images in pixels; None for the default size of the network."""
        return self.values["image_size"]

    @property
    def fixed_size(self) -> bool:
        """Whether all images have the height and width `image_size`, so that kernels are tuned for it."""
        return True

    def shown_size(self, size: int) -> str:
        """Describes the size of the images, for the opening lines of a run."""
        return f"{size} x {size} pixels"

    new_modules: ClassVar[str] = "the classifier"  # what is new in a network that starts from trained weights

    # A batch

    def collate(self, samples: Sequence[tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
        """Collates samples into a batch: images [B, 3, H, W] as bytes, and their targets."""
        images, targets = zip(*samples, strict=True)
        return torch.stack(images), self.collate_targets(targets)

    def collate_targets(self, targets: Sequence[Any]) -> Any:
        """Collates the targets of several images, if possible into a tensor [B, ...].

        The default expects labels, which every image source has, and returns them as int64 [B].
        """
        return torch.as_tensor(targets, dtype=torch.int64)

    def mixable(self, targets: Any) -> Tensor:
        """Converts targets to a float tensor [B, K] that Mixup and CutMix can average. `loss` accepts the average."""
        raise TaskError(f"task={self.name} cannot mix images: set mixup=0 and cutmix=0")

    def example_targets(self, images: Tensor) -> Any:
        """Returns made-up targets for images [B, 3, H, W], with which the memory of a training step is measured.

        The default is None: the memory does not depend on the targets.
        """
        return None

    # Training and evaluation

    def forward(self, model: Any, images: Tensor, targets: Any = None) -> Any:
        """Runs the model. The caller enables autocast if the recipe says so.

        Args:
            images: [B, 3, H, W], normalized.
            targets: the value returned by `collate_targets`, for models that compute their own loss in training, and
                for tasks whose targets hold the sizes of padded images. None if there are no targets.
        """
        return model(images)

    @abstractmethod
    def loss(self, outputs: Any, targets: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the loss of a batch.

        Args:
            outputs: the value returned by `forward`, in the precision of autocast.
            targets: the value returned by `collate_targets`, or by `mixable` if the batch is mixed.

        Returns:
            The mean loss, and the detached sum of each of `train_metrics` over the images of the batch. The trainer
            adds up the sums and divides by the number of images, so that counts stay exact.
        """

    @abstractmethod
    def evaluator(self, *, records: bool = False) -> Evaluator:
        """Creates an evaluator.

        Args:
            records: whether the evaluator also keeps the prediction for each image.
        """

    why_not_attacked: ClassVar[str] = ""  # why `evaluation_loss` does not exist, such as "it predicts boxes"

    def evaluation_loss(self, outputs: Any, targets: Any) -> Tensor:
        """Computes the loss of a batch from the outputs of an evaluation, for adversarial attacks, which raise it.

        It must be a sum of losses of images, each times any positive factor. The default is the ``loss`` of an
        evaluator that returns one for each image, and otherwise `loss`.

        Args:
            outputs: the value returned by `forward` for a network in eval mode, with gradients.
            targets: the value returned by `collate_targets`.
        """
        evaluator = self.evaluator()
        if isinstance(evaluator, MeanEvaluator):
            return evaluator.values_of(outputs, targets)["loss"].sum()
        return self.loss(outputs, targets)[0]

    def image_sizes(self, images: Tensor, targets: Any) -> list[tuple[int, int]]:
        """Returns height and width of each image of a batch without padding, which is at the right and at the bottom.

        The default is for images without padding.

        Args:
            images: [B, 3, H, W].
            targets: the value returned by `collate_targets`.
        """
        height, width = images.shape[-2:]
        return [(height, width)] * len(images)

    def restricted_to(self, labels: Sequence[int]) -> Task:
        """Returns the task with predictions that are restricted to some of the classes."""
        raise TaskError(f"task={self.name} predicts no classes that could be restricted")

    def answers(self, outputs: Any) -> Tensor | None:
        """Returns the answer for each image, [B, ...], whose changes are counted when a mechanism is switched off.

        The default is None: the task has no discrete answers, and only its headline metric is compared.

        Args:
            outputs: the value returned by `forward`.
        """
        return None

    def summary(self) -> dict[str, Any]:
        """Returns the entries that the task adds to summary.json.

        They include ``classes``, which recreate the task of a finished run.
        """
        return {"classes": self.classes}

    # Reports

    def predictions(self, outputs: Any, top: int, targets: Any = None) -> list[dict[str, Any]]:
        """Returns the prediction for each image of a batch, as JSON-serializable values.

        Args:
            outputs: the value returned by `forward`.
            top: the number of answers per image, if the task ranks several.
            targets: the targets that `forward` was given, for tasks whose targets hold the sizes of the images.
        """
        raise TaskError(f"task={self.name} does not describe predictions of single images")

    def show_predictions(self, found: Sequence[Mapping[str, Any]]) -> Table:
        """Returns predictions as a table. Each prediction has the additional entry ``image``."""
        raise TaskError(f"task={self.name} does not describe predictions of single images")

    def draw(self, image: Image.Image, prediction: Mapping[str, Any], *, min_score: float = MIN_SCORE) -> Image.Image:
        """Draws the prediction for an image on it.

        Args:
            image: the image, in its original size.
            prediction: one of `predictions`.
            min_score: objects of a lower score are left out.
        """
        raise TaskError(f"task={self.name} draws no predictions: leave the output folder out")

    def coco_results(
        self, prediction: Mapping[str, Any], image_id: int, categories: Mapping[str, int]
    ) -> list[dict[str, Any]]:
        """Returns the prediction for an image as entries of a COCO results file.

        Args:
            prediction: one of `predictions`.
            image_id: the id of the image.
            categories: the ids of the classes, by name.
        """
        raise TaskError(f"task={self.name} has no COCO results: leave the output folder out")

    def details(self, scores: Scores) -> dict[str, Any]:
        """Returns further results of an evaluation with records, as JSON-serializable values."""
        return {}

    def show_details(self, evaluation: Mapping[str, Any]) -> list[Table]:
        """Returns an evaluation (its metrics, ``loss``, ``images`` and `details`) as tables."""
        metrics = [metric for metric in self.eval_metrics if metric.name in evaluation]
        columns = ["images", *(metric.title for metric in metrics)]
        row = [f"{evaluation['images']:,}", *(metric.format(evaluation[metric.name]) for metric in metrics)]
        if self.evaluates_loss:
            columns.append("loss")
            row.append(f"{evaluation['loss']:.4f}")
        return [Table(f"{evaluation['model']} on {evaluation['data']}", columns, [row])]

    def show_run(self, run: FinishedRun, images: ImageSource | None) -> list[Section]:
        """Returns the sections that the task adds to the report of a run.

        Args:
            run: the finished run.
            images: the test images; None if they cannot be opened by index.
        """
        return []

    def show_comparison(self, runs: Sequence[FinishedRun], images: ImageSource | None) -> list[Section]:
        """Returns the sections that the task adds to the report of a comparison.

        Args:
            runs: one run of each network, all with the same seed.
            images: the test images; None if they cannot be opened by index.
        """
        return []
