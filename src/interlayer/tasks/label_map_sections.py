"""The sections of a report about label maps: pictures beside the truth, the worst images, the confusion of classes.

Everything is computed from the recorded label maps and the annotations of the test images, without the network. See
`interlayer.tasks.segmentation` for the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from .drawing import NOT_COUNTED, REPORT_SIDES, draw_label_map, hex_color, swatches
from .label_maps import IGNORED, label_map_section
from .show import SHOWN_ROWS, FinishedRun, ImageSource, Picture, Section, Span, Table, spread


def label_map_run_sections(run: FinishedRun, images: ImageSource | None, classes: Sequence[str]) -> list[Section]:
    """Returns the sections of a run: predictions beside the truth, the worst images, IoU and confusion of classes."""
    sections: list[Section] = []
    if images is not None and len(run.records.get("prediction", ())):
        quality = run.records["quality"].float().nan_to_num(1).numpy()
        shown = spread(len(quality), SHOWN_ROWS)
        text = "Test images at even distances, with the mean IoU of the classes that are in them or predicted."
        sections.append(_rows("Predictions beside the truth", text, shown, [run], images, classes))
        worst = np.argsort(quality, kind="stable")[:SHOWN_ROWS].tolist()
        text = f"Those of the lowest mean IoU of {len(quality):,} test images."
        sections.append(_rows("Worst images", text, worst, [run], images, classes))
    return [*sections, *_classes([run], classes)]


def label_map_comparison_sections(
    runs: Sequence[FinishedRun], images: ImageSource | None, classes: Sequence[str]
) -> list[Section]:
    """Returns the sections of a comparison: the images on which networks differ most, and the IoU of each class."""
    sections: list[Section] = []
    if images is not None and len(runs) > 1 and all(len(run.records.get("prediction", ())) for run in runs):
        first, second = (run.records["quality"].float().nan_to_num(1).numpy() for run in runs[:2])
        gains = second - first
        better, worse = int((gains > 0).sum()), int((gains < 0).sum())
        text = (
            f"With the first seed, {runs[1].model} has a higher mean IoU than {runs[0].model} on {better:,} of "
            f"{len(gains):,} test images and a lower one on {worse:,}."
        )
        order = np.argsort(-np.abs(gains), kind="stable")[:SHOWN_ROWS].tolist()
        shown = [position for position in order if gains[position]]
        sections.append(_rows("Where they differ most", text, shown, runs, images, classes))
    return [*sections, *_classes(runs, classes)]


def _classes(runs: Sequence[FinishedRun], classes: Sequence[str]) -> list[Section]:
    """Returns the IoU of each class by each network and, if the classes are few, their confusion."""
    if not all(len(run.records.get("class_pixels", ())) for run in runs):
        return []
    title, seed = ("Confusion", "") if len(runs) == 1 else ("Confusion of {}, first seed", ", first seed")
    pixels = [run.records["class_pixels"].sum(dim=0).double() for run in runs]
    ious = [(hits / (truth + predicted - hits)).tolist() for hits, truth, predicted in pixels]
    shares = (pixels[0][1] / pixels[0][1].sum().clamp_min(1)).tolist()
    rows = [
        [name, f"{shares[label]:.1%}", *("" if iou[label] != iou[label] else f"{iou[label]:.1%}" for iou in ious)]
        for label, name in enumerate(classes)
    ]
    columns = ["class", "share of the pixels", *(run.model for run in runs)]
    table = Section("IoU of the classes", f"On all test images{seed}.", tables=[Table("", columns, rows)])
    return [table] + [
        label_map_section(run.records["confusion"].sum(dim=0), classes, title=title.format(run.model))
        for run in runs
        if "confusion" in run.records
    ]


def _rows(
    title: str,
    text: str,
    positions: Sequence[int],
    runs: Sequence[FinishedRun],
    images: ImageSource,
    classes: Sequence[str],
) -> Section:
    """Returns a section with the true label map and the prediction of each network. A single one has the image, too."""
    several = len(runs) > 1
    places = runs[0].records["places"].tolist()
    rows = []
    for position in positions:
        place = places[position]
        image, truth, name = images.open(place), images.target(place), images.name(place)
        line = [Span("truth", "strong"), Span(f", {Path(name).name}")]
        pictures = [Picture(_drawn(image, truth, classes), f"True classes of {name}", [line])]
        if not several:
            photograph = image.copy()
            photograph.thumbnail((REPORT_SIDES[1], REPORT_SIDES[1]), Image.Resampling.LANCZOS)
            pictures.insert(0, Picture(photograph, name, [[Span("image")]]))
        for index, run in enumerate(runs):
            labels = without_padding(run.records["prediction"][position])
            quality = float(run.records["quality"][position])
            line = [Span(f"{run.model}: " if several else "predicted: ", "", index if several else None),
                    Span(f"mIoU {quality:.1%}")]  # fmt: skip
            pictures.append(Picture(_drawn(image, labels, classes), f"Predictions of {run.model}", [line]))
        rows.append(pictures)
    keys = [run.model for run in runs] if several else []
    return Section(title, text, keys=keys, swatches=[*swatches(classes), (NOT_COUNTED, hex_color(IGNORED))], rows=rows)


def _drawn(image: Image.Image, labels: Tensor, classes: Sequence[str]) -> Image.Image:
    return draw_label_map(image, labels, classes, longest=REPORT_SIDES[1], legend=False)


def without_padding(labels: Tensor) -> Tensor:
    """Returns a recorded label map [H, W] without the rows and columns that pad it at the right and at the bottom."""
    inside = labels != IGNORED
    height, width = int(inside.any(dim=1).sum()), int(inside.any(dim=0).sum())
    return labels[:height, :width]
