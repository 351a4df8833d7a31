"""Image classification: one label for each image."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .confusion import confusion_section
from .evaluator import MeanEvaluator, Scores
from .metric import Metric
from .show import FinishedRun, ImageSource, Section, Span, Table, spread, thumbnail
from .task import Task

SHOWN_IMAGES = 24  # maximum number of images in a section of a report
SHOWN_CLASSES = 50  # maximum number of classes in the table of an evaluation
TOP5 = Metric("top5", percent=True, label="top 5", counts_images=True)


class Classification(Task):
    """Trains with cross-entropy, with label smoothing or soft labels, and measures top-1 and top-5 accuracy.

    Top-5 accuracy is left out if there are at most five classes, because it is then always 100%.

    Attributes:
        candidates: the classes that can be predicted, by label; None for all.
    """

    name = "classification"
    headline = Metric("accuracy", percent=True, counts_images=True)
    train_metrics = (headline,)
    eval_metrics: tuple[Metric, ...] = (headline, TOP5)
    candidates: list[int] | None = None

    def __init__(self, values: Mapping[str, Any], classes: Sequence[str]) -> None:
        super().__init__(values, classes)
        if 0 < len(self.classes) <= 5:
            self.eval_metrics = (self.headline,)

    def build(self) -> nn.Module:
        return self.build_network(len(self.classes))

    def mixable(self, targets: Tensor) -> Tensor:
        """Converts labels [B] to smoothed one-hot distributions [B, classes]."""
        smoothing, classes = self.values["label_smoothing"], len(self.classes)
        return F.one_hot(targets, classes).float() * (1 - smoothing) + smoothing / classes

    def restricted_to(self, labels: Sequence[int]) -> Classification:
        """Returns the task with the logits of all other classes set to minus infinity, as for ImageNet-A and -R."""
        task = copy.copy(self)
        task.candidates = sorted(labels)
        if len(task.candidates) <= 5:
            task.eval_metrics = (self.headline,)
        return task

    def forward(self, model: Any, images: Tensor, targets: Any = None) -> Tensor:
        logits = super().forward(model, images, targets)
        if self.candidates is None:
            return logits
        others = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
        others[self.candidates] = False
        return logits.masked_fill(others, float("-inf"))

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the cross-entropy of logits [B, classes] against labels [B] or distributions [B, classes]."""
        logits = outputs.float()
        if targets.dim() == 2:
            loss = torch.sum(-targets * F.log_softmax(logits, dim=-1), dim=-1).mean()
            labels = targets.argmax(dim=1)
        else:
            loss = F.cross_entropy(logits, targets, label_smoothing=self.values["label_smoothing"])
            labels = targets
        return loss, {"accuracy": (logits.detach().argmax(dim=1) == labels).sum()}

    def evaluator(self, *, records: bool = False) -> ClassificationEvaluator:
        return ClassificationEvaluator(records=records)

    def answers(self, outputs: Tensor) -> Tensor:
        """Returns the predicted class of each image, [B]."""
        return outputs.argmax(dim=1)

    # Reports

    def predictions(self, outputs: Tensor, top: int, targets: Any = None) -> list[dict[str, Any]]:
        best = outputs.float().softmax(1).topk(min(top, len(self.classes)), dim=1)
        return [
            {"classes": [{"class": self.classes[c], "probability": p} for c, p in zip(classes, values, strict=True)]}
            for classes, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def show_predictions(self, found: Sequence[Mapping[str, Any]]) -> Table:
        most = max((len(entry["classes"]) for entry in found), default=0)
        rows = [
            [entry["image"], *(f"{answer['class']} {answer['probability']:.1%}" for answer in entry["classes"])]
            for entry in found
        ]
        return Table("", ["image", *(f"class {rank + 1}" for rank in range(most))], rows)

    def details(self, scores: Scores) -> dict[str, Any]:
        """Returns the calibration error, and the accuracy and the most frequent confusion of every class.

        Of several right labels of an image, the class is the predicted one, or the first if a wrong one is predicted.
        """
        from torchmetrics.functional.classification import binary_calibration_error

        labels, predicted = scores.records["predictions"][:, 1], scores.records["predictions"][:, 2]
        # counts instead of a confusion matrix, which would be large for 21,000 classes
        taken_for = [Counter[int]() for _ in self.classes]
        for label, prediction in zip(labels.tolist(), predicted.tolist(), strict=True):
            taken_for[label][prediction] += 1
        return {
            "calibration_error": float(binary_calibration_error(scores.records["confidences"], predicted == labels)),
            "candidate_classes": len(self.classes if self.candidates is None else self.candidates),
            "classes": [self._class_details(label, counts) for label, counts in enumerate(taken_for)],
        }

    def _class_details(self, label: int, taken_for: Counter[int]) -> dict[str, Any]:
        """Describes how often the images of one class are taken for each class."""
        others = {other: count for other, count in sorted(taken_for.items()) if other != label}
        other = max(others, key=others.__getitem__, default=None)
        images = taken_for.total()
        return {
            "class": self.classes[label],
            "images": images,
            "accuracy": taken_for[label] / images if images else None,
            "taken_for": self.classes[other] if other is not None else None,
            "taken_for_images": others[other] if other is not None else 0,
        }

    def show_details(self, evaluation: Mapping[str, Any]) -> list[Table]:
        shown = {
            "images": f"{evaluation['images']:,}",
            "top 1": f"{evaluation['accuracy']:.2%}",
            **({TOP5.title: f"{evaluation['top5']:.2%}"} if "top5" in evaluation else {}),
            "loss": f"{evaluation['loss']:.4f}",
            "calibration error": f"{evaluation['calibration_error']:.4f}",
        }
        entries, note = evaluation["classes"], ""
        candidates, title = evaluation["candidate_classes"], f"{evaluation['model']} on {evaluation['data']}"
        if "labels" in evaluation:
            title += f", labels={evaluation['labels']}"
        if candidates < len(entries):
            title += f", predictions among {candidates:,} of {len(entries):,} classes"
        overall = Table(title, list(shown), [list(shown.values())])
        if len(entries) > SHOWN_CLASSES:
            present = [entry for entry in entries if entry["images"]]
            entries = sorted(present, key=lambda entry: entry["accuracy"])[:SHOWN_CLASSES]
            if len(present) > SHOWN_CLASSES:
                note = f"the {SHOWN_CLASSES} of {len(present):,} classes with the lowest accuracy; --json lists all"
        rows = [
            [
                entry["class"], f"{entry['images']:,}", f"{entry['accuracy']:.2%}" if entry["images"] else "",
                f"{entry['taken_for']} ({entry['taken_for_images']})" if entry["taken_for"] else "",
            ]
            for entry in entries
        ]  # fmt: skip
        return [overall, Table("", ["class", "images", "accuracy", "most often taken for"], rows, note)]

    def show_run(self, run: FinishedRun, images: ImageSource | None) -> list[Section]:
        """Shows which classes are taken for which, and the mistakes with the highest confidence."""
        predictions, confidences = run.records["predictions"], run.records["confidences"]
        confusion = confusion_section(predictions, self.classes)
        return [confusion] if images is None else [confusion, self._mistakes(predictions, confidences, images)]

    def _mistakes(self, predictions: Tensor, confidences: Tensor, images: ImageSource) -> Section:
        mistaken = (predictions[:, 2] != predictions[:, 1]).nonzero().flatten()
        wrong = mistaken[confidences[mistaken].argsort(descending=True)].tolist()
        if not wrong:
            return Section("Mistakes", "None on the test images.")
        pictures = []
        for index in wrong[:SHOWN_IMAGES]:
            place, label, predicted = predictions[index].tolist()
            lines = [self._truth(label), self._answer(label, predicted, float(confidences[index]))]
            pictures.append(thumbnail(images, place, lines))
        text = f"{len(wrong)} of {len(predictions)} test images; those with the highest confidence:"
        return Section("Mistakes", text, pictures=pictures)

    def show_comparison(self, runs: Sequence[FinishedRun], images: ImageSource | None) -> list[Section]:
        """Shows where the first two networks disagree, and which classes each network takes for which."""
        confusions = [
            confusion_section(run.records["predictions"], self.classes, title=f"Confusion of {run.model}, first seed")
            for run in runs
        ]
        return confusions if images is None or len(runs) < 2 else [self._disagreements(runs[:2], images), *confusions]

    def _disagreements(self, pair: Sequence[FinishedRun], images: ImageSource) -> Section:
        """Shows test images for which two networks predict different classes."""
        names = [run.model for run in pair]
        answers = [run.records["predictions"] for run in pair]
        differ = (answers[0][:, 2] != answers[1][:, 2]).nonzero().flatten().tolist()
        title = "Where they disagree"
        if not differ:
            text = "The two networks, with the first seed, predict the same class for every test image."
            return Section(title, text)
        right = [int((rows[differ, 2] == rows[differ, 1]).sum()) for rows in answers]
        pictures = []
        for index in [differ[i] for i in spread(len(differ), SHOWN_IMAGES)]:
            place, label = answers[0][index, :2].tolist()
            lines = [self._truth(label)]
            for key, run in enumerate(pair):
                predicted, confidence = run.records["predictions"][index, 2], run.records["confidences"][index]
                lines.append(self._answer(label, int(predicted), float(confidence), key))
            pictures.append(thumbnail(images, place, lines))
        text = (
            f"The two networks (first seed) predict different classes for {len(differ)} of {len(answers[0])} test "
            f"images: {names[0]} is right on {right[0]} of them, {names[1]} on {right[1]}."
        )
        return Section(title, text, keys=names, legend="the true class is in bold", pictures=pictures)

    def _truth(self, label: int) -> list[Span]:
        return [Span(self.classes[label], "strong")]

    def _answer(self, label: int, predicted: int, confidence: float, key: int | None = None) -> list[Span]:
        tone = "good" if predicted == label else "bad"
        return [Span(self.classes[predicted], tone, key), Span(f" {confidence * 100:.0f}%")]  # type: ignore[arg-type]


class ClassificationEvaluator(MeanEvaluator):
    """Computes cross-entropy without label smoothing, and top-1 and top-5 accuracy.

    Targets are labels [B], or several right labels for each image [B, L], padded with -1. Of several, any one is right,
    and the loss is the negative logarithm of their total probability, which is cross-entropy if there is one.

    Records:
        predictions: [N, 3], the index in the source, the label and the predicted class of each image. Of several right
            labels, the label is the predicted one, or the first if a wrong class is predicted.
        confidences: [N], the probability of the predicted class.
    """

    def values_of(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = outputs.float()
        right = targets if targets.dim() == 2 else targets[:, None]
        hits = (_best(logits)[:, :, None] == right[:, None, :]).any(dim=2)
        losses = (
            _right_log_probability(logits, targets).neg()
            if targets.dim() == 2
            else F.cross_entropy(logits, targets, reduction="none")
        )
        top5 = {TOP5.name: hits.any(dim=1)} if logits.shape[1] > 5 else {}
        return {"loss": losses, "accuracy": hits[:, 0], **top5}

    def records_of(self, outputs: Tensor, targets: Tensor, places: Tensor) -> dict[str, Tensor]:
        logits = outputs.float()
        best = _best(logits)[:, 0]
        if targets.dim() == 2:
            targets = torch.where((targets == best[:, None]).any(dim=1), best, targets[:, 0])
        return {
            "predictions": torch.stack([places, targets, best], dim=1),
            "confidences": logits.softmax(dim=1).amax(dim=1),
        }


def _best(logits: Tensor) -> Tensor:
    """Returns the five most probable classes, [B, 5]. Not argmax, so that ties are broken equally everywhere."""
    return logits.topk(min(5, logits.shape[1]), dim=1).indices


def _right_log_probability(logits: Tensor, right: Tensor) -> Tensor:
    """Returns the logarithm of the total probability of the right labels [B, L], padded with -1: [B]."""
    log_probabilities = logits.log_softmax(dim=1).gather(1, right.clamp_min(0))
    return log_probabilities.masked_fill(right < 0, float("-inf")).logsumexp(dim=1)
