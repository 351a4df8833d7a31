"""The sections of a report about detections: pictures beside the truth, the worst images, precision and recall.

Everything is computed from the recorded detections and the annotations of the test images, without the network. See
`interlayer.tasks.detection` for the records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .detection_records import unpack_masks
from .drawing import REPORT_SIDES, draw_detections, hex_color, swatches
from .matching import RECALLS, Matches, f1_of
from .show import SHOWN_ROWS, FinishedRun, ImageSource, Line, Picture, Plot, Section, Span, Table, spread

SHOWN_CURVES = 12  # maximum number of classes with a curve


@dataclass(frozen=True)
class RecordedDetections:
    """The recorded detections of a run and the true objects of the same images.

    Args:
        model: name of the network.
        records: boxes [N, K, 4], labels [N, K] (-1 for none), scores [N, K] and, optionally, masks.
        truths: the target of each image.
        classes: class names, by label.
    """

    model: str
    records: Mapping[str, Tensor]
    truths: Sequence[Mapping[str, Any]]
    classes: Sequence[str]

    def found(self, position: int) -> dict[str, Tensor]:
        """Returns the detections in the image at this position: boxes, labels and scores."""
        kept = self.records["labels"][position] >= 0
        keys = ("boxes", "labels", "scores", *(["masks"] if "masks" in self.records else []))
        found = {key: self.records[key][position][kept] for key in keys}
        return {**found, "labels": found["labels"].long(), "scores": found["scores"].float()}

    @cached_property
    def matches(self) -> Matches:
        everything = [self.found(position) for position in range(len(self.truths))]
        return Matches.of(everything, self.truths, len(self.classes))

    @cached_property
    def min_score(self) -> float:
        """The score from which detections are shown: the one with the highest F1."""
        return self.matches.best_score()

    @cached_property
    def counts(self) -> np.ndarray:
        """Right and wrong detections that are shown and objects of each image: [N, 3]."""
        return self.matches.counts(self.min_score)

    @cached_property
    def quality(self) -> np.ndarray:
        """The F1 of each image: [N]."""
        return f1_of(self.counts)

    @cached_property
    def precisions(self) -> dict[int, np.ndarray]:
        """The precision at each of `RECALLS`, by the label of each class that has objects."""
        found = {label: self.matches.precision(label) for label in range(len(self.classes))}
        return {label: values for label, values in found.items() if values is not None}

    def picture(self, image: Image.Image, position: int, side: int, *, key: int | None = None) -> Picture:
        """Draws the detections in an image, of ``side`` pixels, and says how many of them are right."""
        found = self.found(position)
        if "masks" in found:
            shown = found["scores"] >= self.min_score
            found = {name: values[shown] for name, values in found.items()}
            found["masks"] = whole_masks(found["masks"], found["boxes"], image.height, image.width)
        drawn = draw_detections(image, found, self.classes, min_score=self.min_score, longest=side, legend=False)
        right, wrong, objects = self.counts[position].tolist()
        missed = objects - right
        line = [
            Span(f"{self.model}: " if key is not None else "predicted: ", "", key), Span(f"{right} right", "good"),
            Span(", "), Span(f"{wrong} wrong", "bad" if wrong else ""), Span(", "),
            Span(f"{missed} missed", "bad" if missed else ""), Span(f", F1 {self.quality[position]:.2f}"),
        ]  # fmt: skip
        return Picture(drawn, f"Predictions of {self.model}", [line])


def whole_masks(bits: Tensor, boxes: Tensor, height: int, width: int) -> Tensor:
    """Returns recorded masks, packed bits [K, 98] of 28 x 28 pixels inside boxes [K, 4], as booleans [K, H, W]."""
    masks = unpack_masks(bits).numpy().astype(np.uint8)
    whole = torch.zeros(len(bits), height, width, dtype=torch.bool)
    for index, (mask, box) in enumerate(zip(masks, boxes.round().int().tolist(), strict=True)):
        left, top, right, bottom = max(0, box[0]), max(0, box[1]), min(width, box[2]), min(height, box[3])
        if right > left and bottom > top:
            size = box[2] - box[0], box[3] - box[1]
            resized = np.asarray(Image.fromarray(mask * 255).resize(size, Image.Resampling.BILINEAR)) >= 128
            inside = resized[top - box[1] : bottom - box[1], left - box[0] : right - box[0]]
            whole[index, top:bottom, left:right] = torch.from_numpy(inside)
    return whole


def detection_run_sections(run: FinishedRun, images: ImageSource | None, classes: Sequence[str]) -> list[Section]:
    """Returns the sections of a run: predictions beside the truth, the worst images, precision and recall."""
    if images is None or "boxes" not in run.records or not len(run.records["boxes"]):
        return []
    (recorded,), places = _recorded([run], images, classes)
    text = (
        f"Test images at even distances. Detections with a score of at least {recorded.min_score:.2f} are shown, at "
        f"which F1 over all test images is highest. A detection is right if it overlaps an object of its class with an "
        f"IoU of at least 0.5."
    )
    shown = spread(len(places), SHOWN_ROWS)
    sections = [_rows("Predictions beside the truth", text, shown, [recorded], images, places)]
    worst = [position for position in np.argsort(recorded.quality, kind="stable") if recorded.quality[position] < 1]
    if worst:
        text = f"{len(worst):,} of {len(places):,} test images have wrong or missed objects; those of the lowest F1:"
        sections.append(_rows("Worst images", text, worst[:SHOWN_ROWS], [recorded], images, places))
    else:
        sections.append(Section("Worst images", "None: every object of the test images is found."))
    return [*sections, _curves_of_classes(recorded)]


def detection_comparison_sections(
    runs: Sequence[FinishedRun], images: ImageSource | None, classes: Sequence[str]
) -> list[Section]:
    """Returns the sections of a comparison: the images on which networks differ most, precision and recall."""
    if images is None or any("boxes" not in run.records or not len(run.records["boxes"]) for run in runs):
        return []
    recorded, places = _recorded(runs, images, classes)
    sections = []
    if len(recorded) > 1:
        gains = recorded[1].quality - recorded[0].quality
        order = np.argsort(-np.abs(gains), kind="stable")
        names = [entry.model for entry in recorded]
        better, worse = int((gains > 0).sum()), int((gains < 0).sum())
        text = (
            f"With the first seed, {names[1]} has a higher F1 than {names[0]} on {better:,} of {len(gains):,} test "
            f"images and a lower one on {worse:,}. Detections are shown from the score of the highest F1 "
            f"({', '.join(f'{entry.min_score:.2f}' for entry in recorded)})."
        )
        shown = [position for position in order[:SHOWN_ROWS] if gains[position]]
        sections.append(_rows("Where they differ most", text, shown, recorded, images, places))
    return [*sections, _curves_of_networks(recorded)]


def _recorded(
    runs: Sequence[FinishedRun], images: ImageSource, classes: Sequence[str]
) -> tuple[list[RecordedDetections], list[int]]:
    """Returns the detections of runs on the same test images, and the index of each image in its source."""
    records = runs[0].records
    places = records["places"].tolist()
    truths = [{k: v for k, v in images.target(place).items() if k != "masks"} for place in places]
    return [RecordedDetections(run.model, run.records, truths, classes) for run in runs], places


def _rows(
    title: str,
    text: str,
    positions: Sequence[int],
    recorded: Sequence[RecordedDetections],
    images: ImageSource,
    places: Sequence[int],
) -> Section:
    """Returns a section with the truth and the predictions of each network for some images."""
    classes, several = recorded[0].classes, len(recorded) > 1
    side = REPORT_SIDES[several]
    rows = []
    for position in positions:
        place = places[position]
        image, truth, name = images.open(place), images.target(place), images.name(place)
        drawn = draw_detections(image, truth, classes, longest=side, legend=False)
        count = int(recorded[0].counts[position, 2])
        line = [Span("truth", "strong"), Span(f": {count} object{'s' * (count != 1)}, {Path(name).name}")]
        pictures = [
            entry.picture(image, position, side, key=index if several else None) for index, entry in enumerate(recorded)
        ]
        rows.append([Picture(drawn, f"True objects of {name}", [line]), *pictures])
    keys = [entry.model for entry in recorded] if several else []
    return Section(title, text, keys=keys, swatches=swatches(classes), rows=rows)


def _curves_of_classes(recorded: RecordedDetections) -> Section:
    """Returns the precision over the recall of each class."""
    classes, precisions = recorded.classes, recorded.precisions
    lines = [
        Line(f"{classes[label]}, AP50 {values.mean():.3f}", RECALLS.tolist(), values.tolist(), hex_color(label))
        for label, values in list(precisions.items())[:SHOWN_CURVES]
    ]
    text = "Precision of the boxes over recall, at an IoU of 0.5. The area below a curve is the AP50 of the class."
    if len(precisions) > SHOWN_CURVES:
        text += f" The first {SHOWN_CURVES} of {len(precisions)} classes have a curve."
    kept = recorded.matches.scores >= recorded.min_score
    rows = []
    for label, values in precisions.items():
        of_class = kept & (recorded.matches.labels == label)
        right, total = int(recorded.matches.right[of_class].sum()), int(recorded.matches.objects[:, label].sum())
        precision = f"{right / of_class.sum():.1%}" if of_class.any() else ""
        rows.append([classes[label], f"{total:,}", f"{values.mean():.4f}", precision, f"{right / total:.1%}"])
    columns = ["class", "objects", "AP50", "precision", "recall"]
    table = Table("", columns, rows, f"precision and recall at a score of at least {recorded.min_score:.2f}")
    plot = Plot("Precision over recall of each class", "recall", "precision", lines)
    return Section("Precision and recall", text, plot=plot, tables=[table])


def _curves_of_networks(recorded: Sequence[RecordedDetections]) -> Section:
    """Returns the mean precision of the classes over the recall, of each network."""
    lines = []
    for entry in recorded:
        mean = np.mean(list(entry.precisions.values()), axis=0) if entry.precisions else np.zeros(len(RECALLS))
        lines.append(Line(f"{entry.model}, AP50 {mean.mean():.3f}", RECALLS.tolist(), mean.tolist()))
    rows = [
        [
            recorded[0].classes[label], f"{int(recorded[0].matches.objects[:, label].sum()):,}",
            *(f"{entry.precisions[label].mean():.4f}" for entry in recorded),
        ]
        for label in recorded[0].precisions
    ]  # fmt: skip
    columns = ["class", "objects", *(f"AP50 of {entry.model}" for entry in recorded)]
    text = "Precision of the boxes over recall, at an IoU of 0.5: mean over the classes, first seed."
    plot = Plot("Precision over recall of each network", "recall", "precision", lines)
    return Section("Precision and recall", text, plot=plot, tables=[Table("", columns, rows)])
