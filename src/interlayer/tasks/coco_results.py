"""Predictions of single images as JSON-serializable values, and COCO's format of results.

`describe_detections` and `describe_label_map` turn tensors into plain values: boxes in pixels of the original image,
masks as COCO's run lengths. `detections_of` and `label_map_of` are their inverses. COCO's results are a list with one
entry for each object: image_id, category_id, score, bbox (left, top, width, height) and, for masks, segmentation. A
label map has an entry for each class that occurs, without a box and a score, as in COCO's task of stuff segmentation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .label_maps import IGNORED
from .run_lengths import RunLengths
from .show import MIN_SCORE, Table
from .task import TaskError

MASK_THRESHOLD = 0.5  # the probability from which a pixel belongs to a mask


def describe_detections(found: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """Returns the objects found in an image, in the order of their scores.

    Args:
        found: boxes [N, 4] (left, top, right, bottom), labels [N], scores [N] and, optionally, masks [N, H, W] or
            torchvision's probabilities [N, 1, H, W].
        classes: class names, by label.

    Returns:
        The list ``objects``, with ``class``, ``score``, ``box`` and, with masks, ``mask`` of each.
    """
    scores = found["scores"].detach().float().cpu()
    order = scores.argsort(descending=True, stable=True)
    boxes, labels = found["boxes"].detach().float().cpu()[order], found["labels"].detach().cpu()[order]
    objects: list[dict[str, Any]] = [
        {"class": classes[label], "score": round(score, 5), "box": [round(edge, 2) for edge in box]}
        for label, score, box in zip(labels.tolist(), scores[order].tolist(), boxes.tolist(), strict=True)
    ]
    if found.get("masks") is not None:
        masks = binary_masks(found["masks"].detach().cpu())[order]
        for entry, mask in zip(objects, masks, strict=True):
            entry["mask"] = RunLengths.encode(mask.numpy()).as_dict()
    return {"objects": objects}


def binary_masks(masks: Tensor) -> Tensor:
    """Returns masks [N, H, W] or probabilities [N, 1, H, W] as booleans [N, H, W]."""
    masks = masks.squeeze(1) if masks.dim() == 4 else masks
    return masks >= MASK_THRESHOLD if masks.is_floating_point() else masks.bool()


def detections_of(description: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Tensor]:
    """Returns the boxes, labels, scores and, if present, masks that `describe_detections` described."""
    objects, labels = description["objects"], {name: label for label, name in enumerate(classes)}
    found = {
        "boxes": torch.tensor([entry["box"] for entry in objects], dtype=torch.float32).view(-1, 4),
        "labels": torch.tensor([labels[entry["class"]] for entry in objects], dtype=torch.int64),
        "scores": torch.tensor([entry["score"] for entry in objects], dtype=torch.float32),
    }
    if objects and "mask" in objects[0]:
        found["masks"] = torch.from_numpy(np.stack([_decode(entry["mask"]) for entry in objects]))
    return found


def describe_label_map(labels: Tensor, classes: Sequence[str]) -> dict[str, Any]:
    """Returns the classes of the pixels of an image.

    Args:
        labels: the class of each pixel, [H, W]; `IGNORED` for none.
        classes: class names, by label.

    Returns:
        ``height`` and ``width``, and the list ``classes``, with ``class``, ``share`` (of the pixels) and ``mask`` of
        each class that occurs, the largest first.
    """
    numbers = labels.detach().cpu().numpy()
    counts = np.bincount(numbers.ravel(), minlength=len(classes))[: len(classes)]
    entries = [
        {
            "class": classes[label],
            "share": round(int(counts[label]) / numbers.size, 5),
            "mask": RunLengths.encode(numbers == label).as_dict(),
        }
        for label in np.argsort(-counts, kind="stable").tolist()
        if counts[label]
    ]
    return {"height": numbers.shape[0], "width": numbers.shape[1], "classes": entries}


def label_map_of(description: Mapping[str, Any], classes: Sequence[str]) -> np.ndarray:
    """Returns the label map, [H, W], that `describe_label_map` described."""
    labels = np.full((description["height"], description["width"]), IGNORED, dtype=np.uint8)
    for entry in description["classes"]:
        labels[_decode(entry["mask"])] = classes.index(entry["class"])
    return labels


def _decode(mask: Mapping[str, Any]) -> np.ndarray:
    return RunLengths.of(mask, *mask["size"]).decode()


def detection_table(found: Sequence[Mapping[str, Any]], classes: Sequence[str]) -> Table:
    """Returns the numbers of objects of each class in images, from what `describe_detections` returned."""
    rows = []
    for entry in found:
        kept = [item["class"] for item in entry["objects"] if item["score"] >= MIN_SCORE]
        rows.append([entry["image"], str(len(kept)), ", ".join(f"{k} {kept.count(k)}" for k in classes if k in kept)])
    return Table("", ["image", "objects", "classes"], rows, f"objects with a score of at least {MIN_SCORE:g}")


def label_map_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the shares of the classes in the pixels of images, from what `describe_label_map` returned."""
    rows = [
        [entry["image"], ", ".join(f"{item['class']} {item['share']:.1%}" for item in entry["classes"])]
        for entry in found
    ]
    return Table("", ["image", "classes of the pixels"], rows)


# COCO


@dataclass(frozen=True)
class CocoIds:
    """The ids of images and classes in a COCO file.

    Args:
        images: the ids of the images, by their names.
        categories: the ids of the classes, by their names.
    """

    images: Mapping[str, int]
    categories: Mapping[str, int]

    @classmethod
    def numbered(cls, names: Sequence[str], classes: Sequence[str]) -> CocoIds:
        """Counts images and classes from 1, in their order."""
        return cls(_from_one(names), _from_one(classes))

    @classmethod
    def read(cls, file: Path, names: Sequence[str], classes: Sequence[str]) -> CocoIds:
        """Reads the ids of a dataset.

        Args:
            file: the dataset's COCO file.
            names: the image files. Their ids are those of the images in the file whose names they end with.
            classes: the names of the classes.

        Raises:
            TaskError: if the file is not a COCO file, or lacks one of the images or classes.
        """
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            numbers = {str(entry["file_name"]): int(entry["id"]) for entry in content["images"]}
            categories = {str(entry["name"]): int(entry["id"]) for entry in content["categories"]}
        except OSError as error:
            raise TaskError(f"{file} cannot be read: {error.strerror}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise TaskError(f"{file} is not a COCO file: expected images and categories with ids and names") from error
        for name in classes:
            if name not in categories:
                raise TaskError(f"{file} has no category {name!r}, which the network predicts")
        return cls({name: _image_id(name, numbers, file) for name in names}, {k: categories[k] for k in classes})


def _from_one(names: Sequence[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names, start=1)}


def _image_id(name: str, numbers: Mapping[str, int], file: Path) -> int:
    parts = Path(name).parts
    for length in range(len(parts), 0, -1):  # names in the file may contain folders
        number = numbers.get("/".join(parts[-length:]))
        if number is not None:
            return number
    raise TaskError(f"{file} has no image {parts[-1]}: give the COCO file of the images, or leave it out")


def coco_detections(description: Mapping[str, Any], image_id: int, categories: Mapping[str, int]) -> list[dict]:
    """Returns COCO's results of an image from what `describe_detections` returned."""
    results = []
    for entry in description["objects"]:
        left, top, right, bottom = entry["box"]
        result = {
            "image_id": image_id,
            "category_id": categories[entry["class"]],
            "bbox": [left, top, round(right - left, 2), round(bottom - top, 2)],
            "score": entry["score"],
        }
        results.append({**result, "segmentation": entry["mask"]} if "mask" in entry else result)
    return results


def coco_label_map(description: Mapping[str, Any], image_id: int, categories: Mapping[str, int]) -> list[dict]:
    """Returns COCO's results of an image from what `describe_label_map` returned."""
    return [
        {"image_id": image_id, "category_id": categories[entry["class"]], "segmentation": entry["mask"]}
        for entry in description["classes"]
    ]
