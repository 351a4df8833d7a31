"""Objects in Pascal VOC's XML: boxes.

    FOLDER/ImageSets/Main/train.txt    the names of the images of a split
    FOLDER/Annotations/NAME.xml        the objects of an image
    FOLDER/JPEGImages/NAME.jpg         the image

VOC counts pixels from 1 and includes the last one, so that xmin=1, xmax=W is the entire width. A box whose xmin and
xmax are equal is taken for a mistake and has no area. Difficult objects are crowds: see `AnnotatedObject`.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from ..files import TrainingError
from .annotated import (
    AnnotatedImage,
    AnnotatedImages,
    AnnotatedObject,
    AnnotationError,
    AnnotationProblems,
    usable_box,
    with_objects,
)
from .images import Problems, unreadable

SUFFIXES = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG")


def read_voc(
    root: Path,
    split: str,
    problems: Problems,
    *,
    classes: Sequence[str] | None = None,
    crowds: bool = False,
    keep_empty: bool = False,
) -> AnnotatedImages:
    """Reads one split of a folder in the layout of Pascal VOC.

    Args:
        root: the folder.
        split: the name of the list of images in ImageSets/Main, without its suffix.
        problems: collects what cannot be used.
        classes: the class names of the training images, for another split; if None, the sorted names of the objects.
        crowds: see `AnnotatedImages`.
        keep_empty: see `with_objects`.
    """
    found = AnnotationProblems(problems)
    listed = root / "ImageSets" / "Main" / f"{split}.txt"
    parsed: dict[str, tuple[AnnotatedImage, Path, list[ElementTree.Element]]] = {}
    for line, name in _names(listed):
        label = f"{listed} line {line}"
        if name in parsed:
            found.add(label, f"its image {name} is a duplicate")
            continue
        try:
            parsed[name] = _parse(root, name, len(parsed))
        except AnnotationError as error:
            found.add(label, str(error))
    if classes is None:
        classes = sorted({_text(entry, "name") for _, _, entries in parsed.values() for entry in entries} - {""})
    for image, file, entries in parsed.values():
        for number, entry in enumerate(entries, start=1):
            name = f"{file} object {number}"
            try:
                image.objects.append(_object(name, entry, image, classes))
            except AnnotationError as error:
                found.add(name, str(error), image.name)
    usable = with_objects([image for image, _, _ in parsed.values()], found, keep_empty=keep_empty)
    found.report()
    if not usable:
        raise TrainingError(f"{listed} has no image that can be used")
    return AnnotatedImages(usable, classes, crowds=crowds)


def _names(listed: Path) -> list[tuple[int, str]]:
    """Returns the line numbers and names of a list of images. A second column is ignored."""
    try:
        lines = listed.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise TrainingError(f"{listed} cannot be read: {error.strerror}") from error
    return [(number, line.split()[0]) for number, line in enumerate(lines, start=1) if line.strip()]


def _parse(root: Path, name: str, image_id: int) -> tuple[AnnotatedImage, Path, list[ElementTree.Element]]:
    """Returns an image without objects, the file of its annotations, and the XML elements of its objects."""
    file = root / "Annotations" / f"{name}.xml"
    if not file.is_file():
        raise AnnotationError(f"its file {file} is missing")
    try:
        tree = ElementTree.parse(file).getroot()
    except ElementTree.ParseError as error:
        raise AnnotationError(f"its file {file} is not XML ({error})") from error
    pictures = [root / "JPEGImages" / f"{name}{suffix}" for suffix in SUFFIXES]
    picture = next((path for path in pictures if path.is_file()), None)
    if picture is None:
        raise AnnotationError(f"its file {pictures[0]} is missing")
    try:
        with Image.open(picture) as opened:  # reads only the header; sizes in the XML are often wrong
            width, height = opened.size
    except Exception as error:
        raise AnnotationError(f"its file {picture}: {unreadable(error)}") from error
    return AnnotatedImage(str(file), picture, image_id, height, width), file, tree.findall("object")


def _text(entry: ElementTree.Element, path: str) -> str:
    return (entry.findtext(path) or "").strip()


def _object(name: str, entry: ElementTree.Element, image: AnnotatedImage, classes: Sequence[str]) -> AnnotatedObject:
    kind = _text(entry, "name")
    if kind not in classes:
        raise AnnotationError(f"its class {kind!r} is not among the classes {', '.join(classes)}")
    texts = [_text(entry, f"bndbox/{edge}") for edge in ("xmin", "ymin", "xmax", "ymax")]
    try:
        left, top, right, bottom = map(float, texts)
    except ValueError:
        raise AnnotationError(f"its box {texts} is not four numbers") from None
    usable_box((left, top, right, bottom), image.height, image.width)  # one pixel is no area
    box = usable_box((left - 1, top - 1, right, bottom), image.height, image.width)
    return AnnotatedObject(name, classes.index(kind), box, crowd=_text(entry, "difficult") == "1")
