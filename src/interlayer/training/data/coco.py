"""Objects in COCO's JSON: boxes, and masks as polygons or run lengths.

Annotations whose image, class, box or mask cannot be used are named by the file and their id.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...tasks.run_lengths import MaskError, RunLengths
from ..files import TrainingError
from .annotated import (
    AnnotatedImage,
    AnnotatedImages,
    AnnotatedObject,
    AnnotationError,
    AnnotationProblems,
    ObjectMask,
    usable_box,
    with_objects,
)
from .images import Problems


@dataclass(frozen=True)
class Polygons:
    """A mask as the union of polygons.

    Args:
        polygons: the corners of each polygon: x, y, x, y, ...
        height, width: the size of the mask.
    """

    polygons: Sequence[Sequence[float]]
    height: int
    width: int

    @classmethod
    def of(cls, polygons: Sequence[Any], height: int, width: int) -> Polygons:
        """Checks the polygons of an object. Raises a `MaskError` if one is not a list of at least three corners."""
        for polygon in polygons:
            numbers = isinstance(polygon, Sequence) and all(isinstance(value, (int, float)) for value in polygon)
            if not numbers or len(polygon) < 6 or len(polygon) % 2:
                raise MaskError("it has a polygon that is not x and y of at least three corners")
        if not polygons:
            raise MaskError("it has no polygons")
        return cls(polygons, height, width)

    def decode(self) -> np.ndarray:
        """Returns the mask, booleans [H, W], rasterized as COCO does."""
        encoder = mask_encoder()
        encoded = encoder.frPyObjects([list(map(float, polygon)) for polygon in self.polygons], self.height, self.width)
        return encoder.decode(encoder.merge(encoded)).astype(bool)


def mask_encoder() -> Any:
    """Returns the module that rasterizes polygons. Raises if the extra is not installed."""
    try:
        from faster_coco_eval.core import mask
    except ImportError as error:
        raise TrainingError(
            "polygons are rasterized by faster-coco-eval: install it with pip install 'interlayer[detection]'"
        ) from error
    return mask


def read_coco(
    file: Path,
    images_folder: Path,
    problems: Problems,
    *,
    classes: Sequence[str] | None = None,
    masks: bool = False,
    crowds: bool = False,
    keep_empty: bool = False,
) -> AnnotatedImages:
    """Reads a COCO JSON file.

    Args:
        file: the JSON file.
        images_folder: the folder of its images.
        problems: collects what cannot be used.
        classes: the class names of the training images, for another split; if None, the names of the categories in
            the order of their ids.
        masks: whether to read the masks.
        crowds: see `AnnotatedImages`.
        keep_empty: see `with_objects`.
    """
    content = _load(file)
    if masks and _has_polygons(content["annotations"]):
        mask_encoder()  # an error now instead of one in a worker
    found = AnnotationProblems(problems)
    names = _categories(file, content["categories"], found)
    known = list(classes) if classes is not None else [names[number] for number in sorted(names)]
    images = _images(file, images_folder, content["images"], found)
    labels = {number: known.index(name) for number, name in names.items() if name in known}
    seen: set[int | None] = set()
    for position, entry in enumerate(content["annotations"]):
        number = _number(entry, "id")
        name = f"{file} annotation {f'at position {position}' if number is None else number}"
        image = images.get(_number(entry, "image_id"))
        owner = image.name if image else None
        if number is not None and number in seen:
            found.add(f"{name} (again)", f"its id {number} is a duplicate", owner)
            continue
        seen.add(number)
        if _number(entry, "image_id") not in images:
            found.add(name, f"its image {entry.get('image_id')} is not among the images of the file")
        elif image is not None:  # otherwise its image is missing, which is recorded
            try:
                image.objects.append(_object(name, entry, image, names, labels, masks=masks))
            except (AnnotationError, MaskError) as error:
                found.add(name, str(error), owner)
    usable = with_objects([image for image in images.values() if image], found, keep_empty=keep_empty)
    found.report()
    if not usable:
        raise TrainingError(f"{file} has no image that can be used")
    return AnnotatedImages(usable, known, crowds=crowds)


def _load(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainingError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise TrainingError(f"{file} is not JSON: {error}") from error
    for key in ("images", "annotations", "categories"):
        entries = content.get(key) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise TrainingError(f"{file} is not a COCO file: expected a list of {key}")
    return content


def _number(entry: Mapping[str, Any], key: str) -> int | None:
    """Returns an id, or None if it is not a whole number."""
    value = entry.get(key)
    return value if type(value) is int else None


def _has_polygons(annotations: Sequence[Mapping[str, Any]]) -> bool:
    return any(isinstance(entry.get("segmentation"), list) for entry in annotations)


def _categories(file: Path, categories: Sequence[Mapping[str, Any]], found: AnnotationProblems) -> dict[int, str]:
    """Returns the class names by the ids of the categories."""
    names: dict[int, str] = {}
    for position, category in enumerate(categories):
        number, name = _number(category, "id"), str(category.get("name"))
        if number is None or "name" not in category:
            raise TrainingError(f"{file} category at position {position} has no id and name")
        if number in names or name in names.values():
            found.add(f"{file} category {number} (again)", f"its id or its name {name!r} is a duplicate")
        else:
            names[number] = name
    return names


def _images(
    file: Path, folder: Path, entries: Sequence[Mapping[str, Any]], found: AnnotationProblems
) -> dict[int | None, AnnotatedImage | None]:
    """Returns the images by their ids; None for those that are recorded as a problem."""
    images: dict[int | None, AnnotatedImage | None] = {}
    for position, entry in enumerate(entries):
        number = _number(entry, "id")
        name = f"{file} image {f'at position {position}' if number is None else number}"
        if number is None:
            found.add(name, "its id is not a whole number")
            continue
        if number in images:
            found.add(f"{name} (again)", f"its id {number} is a duplicate")
            continue
        images[number] = None
        size = entry.get("height"), entry.get("width")
        path = folder / str(entry.get("file_name"))
        if not all(isinstance(side, int) and side > 0 for side in size):
            found.add(name, f"its height and width are {size[0]} and {size[1]}")
        elif not os.path.isfile(path):
            found.add(name, f"its file {path} is missing")
        else:
            images[number] = AnnotatedImage(name, path, number, *size)  # type: ignore[arg-type]
    return images


def _object(
    name: str,
    entry: Mapping[str, Any],
    image: AnnotatedImage,
    names: Mapping[int, str],
    labels: Mapping[int, int],
    *,
    masks: bool,
) -> AnnotatedObject:
    number, box = _number(entry, "category_id"), entry.get("bbox")
    if number is None or number not in labels:
        known = "not among the categories"
        if number is not None and number in names:
            known = f"{names[number]!r}, which the training images lack"
        raise AnnotationError(f"its class {entry.get('category_id')} is {known}")
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(edge, (int, float)) for edge in box):
        raise AnnotationError(f"its box {box} is not x, y, width and height")
    left, top, width, height = box
    corners = usable_box((left, top, left + width, top + height), image.height, image.width)
    area = entry.get("area")
    area = float(area) if isinstance(area, (int, float)) else None
    mask = _mask(entry.get("segmentation"), image) if masks else None
    return AnnotatedObject(name, labels[number], corners, area, mask, bool(entry.get("iscrowd", 0)))


def _mask(segmentation: Any, image: AnnotatedImage) -> ObjectMask:
    if isinstance(segmentation, Mapping):
        runs = RunLengths.of(segmentation, image.height, image.width)
        if not runs.area:
            raise MaskError("its mask has no area")
        return runs
    if isinstance(segmentation, Sequence) and not isinstance(segmentation, str):
        return Polygons.of(segmentation, image.height, image.width)
    raise MaskError("it has no mask: expected polygons or RLE as its segmentation")
