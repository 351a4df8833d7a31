"""Pictures of predictions: boxes with class names and scores, masks of objects, and label maps with a legend.

The color of a class depends on its label alone, so that it is the same in all pictures. Pictures that are smaller than
`SMALLEST` are enlarged before anything is drawn, because names and scores could not be read otherwise.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from .label_maps import IGNORED

Color = tuple[int, int, int]
Area = tuple[float, float, float, float]  # left, top, right, bottom
REPORT_SIDES = (480, 360)  # pixels of the longer side of a picture in a report: of two side by side, and of more
NOT_COUNTED = "not counted"  # the name of ignored pixels
SMALLEST = 480  # pixels of the longer side of a picture
MOST_COVERED = 0.25  # share of a box that a text may cover
DRAWN_TOGETHER = 2**26  # pixels of the masks that are drawn at once, which limits the memory
TEXT_SHARE = 36  # the longer side of a picture divided by the height of its text
IGNORED_COLOR = (128, 128, 128)
PALETTE: tuple[Color, ...] = (
    (40, 205, 80), (255, 145, 0), (38, 107, 255), (224, 32, 122), (0, 194, 222), (250, 215, 30), (128, 62, 190),
    (190, 235, 60), (148, 82, 32), (255, 150, 190), (16, 60, 130), (0, 120, 120), (200, 20, 20), (190, 165, 255),
    (110, 120, 20), (255, 200, 150), (90, 0, 70), (120, 200, 170),
)  # fmt: skip


def class_color(label: int) -> Color:
    """Returns the color of a class: one of `PALETTE` or, for larger labels, of evenly spread hues."""
    if label < len(PALETTE):
        return PALETTE[label]
    hue, index = (label * 0.61803) % 1, label - len(PALETTE)
    rgb = colorsys.hsv_to_rgb(hue, (0.9, 0.55, 0.75)[index % 3], (0.9, 1.0, 0.6)[index % 3])
    return tuple(round(255 * value) for value in rgb)  # type: ignore[return-value]


def hex_color(label: int) -> str:
    """Returns the color of a class, or that of ignored pixels, as #RRGGBB."""
    return "#{:02x}{:02x}{:02x}".format(*(IGNORED_COLOR if label == IGNORED else class_color(label)))


def swatches(classes: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the names and the colors of classes for the legend of a report."""
    return [(name, hex_color(label)) for label, name in enumerate(classes)]


def draw_detections(
    image: Image.Image,
    found: Mapping[str, Any],
    classes: Sequence[str],
    *,
    min_score: float = 0.0,
    longest: int | None = None,
    legend: bool = True,
) -> Image.Image:
    """Draws boxes with class names and scores, and masks if there are any, on an image.

    The text of a box is its class and score, or its score alone where there is no room, or nothing: texts overlap
    neither each other nor, by more than `MOST_COVERED`, any box. Boxes with the highest scores come first. The legend
    has the classes and their numbers. The name of a single class is only there. Boxes of objects with masks are thin.

    Args:
        image: the image.
        found: boxes [N, 4] (left, top, right, bottom in pixels of the image), labels [N] and, optionally, scores [N]
            and masks [N, H, W]. True boxes have no scores.
        classes: class names, by label.
        min_score: objects of a lower score are left out.
        longest: the largest length of the longer side of the picture; that of the image if None. The image is reduced
            before anything is drawn, so that lines and texts keep their size.
        legend: whether a legend is added below the image.
    """
    scores = found.get("scores")
    kept = slice(None) if scores is None else torch.as_tensor(scores) >= min_score
    labels = torch.as_tensor(found["labels"])[kept].tolist()
    boxes = torch.as_tensor(found["boxes"], dtype=torch.float32).view(-1, 4)[kept]
    kept_scores = None if scores is None else torch.as_tensor(scores)[kept].tolist()
    picture = _resized(image, longest)
    boxes = boxes * (torch.tensor([*picture.size, *picture.size]) / torch.tensor([*image.size, *image.size]))
    colors = [class_color(label) for label in labels]
    masks = found.get("masks")
    if labels and masks is not None:
        picture = _with_masks(picture, torch.as_tensor(masks)[kept], colors)
    if labels:
        picture = _with_boxes(picture, boxes, colors, thin=masks is not None)
        _write_texts(picture, boxes, labels, kept_scores, classes)
    present = {label: labels.count(label) for label in sorted(set(labels))}
    return with_legend(picture, [(class_color(k), f"{classes[k]} ({n})") for k, n in present.items()], legend=legend)


def draw_label_map(
    image: Image.Image,
    labels: Tensor | np.ndarray,
    classes: Sequence[str],
    *,
    opacity: float = 0.65,
    longest: int | None = None,
    legend: bool = True,
) -> Image.Image:
    """Draws the classes of pixels over an image, with a legend of the classes that occur.

    Args:
        image: the image.
        labels: the class of each pixel, [h, w], in any size. Pixels of the label 255 are ignored: they are gray.
        classes: class names, by label.
        opacity: the opacity of the colors, from 0 to 1.
        longest, legend: see `draw_detections`.
    """
    picture = _resized(image, longest)
    numbers = np.asarray(labels).astype(np.uint8)
    scaled = np.asarray(Image.fromarray(numbers).resize(picture.size, Image.Resampling.NEAREST))
    colors = np.full((256, 3), IGNORED_COLOR, dtype=np.uint8)
    colors[: len(classes)] = [class_color(label) for label in range(len(classes))]
    picture = Image.blend(picture, Image.fromarray(colors[scaled]), opacity)
    shares = np.bincount(numbers.ravel(), minlength=256) / numbers.size
    entries = [
        (class_color(label), f"{classes[label]} ({_percent(shares[label])})")
        for label in np.argsort(-shares[: len(classes)], kind="stable").tolist()
        if shares[label]
    ]
    if shares[IGNORED]:
        entries.append((IGNORED_COLOR, f"{NOT_COUNTED} ({_percent(shares[IGNORED])})"))
    return with_legend(picture, entries, legend=legend)


def _percent(share: float) -> str:
    return "<1%" if share < 0.01 else f"{share:.0%}"


def with_legend(picture: Image.Image, entries: Sequence[tuple[Color, str]], *, legend: bool = True) -> Image.Image:
    """Adds a legend below a picture: colors and their names, in as many lines as needed.

    Args:
        picture: the picture.
        entries: colors and names. Without any, the picture is returned as it is.
        legend: whether the legend is added.
    """
    if not legend or not entries:
        return picture
    font = _font(picture)
    height = _text_height(picture)
    gap, line = height // 2, round(1.5 * height)
    places: list[tuple[int, int]] = []
    x, y = gap, gap
    for _, name in entries:
        width = height + gap + round(font.getlength(name)) + 2 * gap
        if x > gap and x + width > picture.width:
            x, y = gap, y + line
        places.append((x, y))
        x += width
    result = Image.new("RGB", (picture.width, picture.height + y + line), "white")
    result.paste(picture, (0, 0))
    draw = ImageDraw.Draw(result)
    for (color, name), (left, top) in zip(entries, places, strict=True):
        top += picture.height
        draw.rectangle((left, top, left + height, top + height), fill=color, outline=(60, 60, 60))
        draw.text((left + height + gap, top + height / 2), name, fill=(20, 20, 20), font=font, anchor="lm")
    return result


def _resized(image: Image.Image, longest: int | None) -> Image.Image:
    """Returns a copy whose longer side is at least `SMALLEST` and at most `longest` pixels."""
    side = max(image.size)
    wanted = max(side, SMALLEST) if longest is None else min(max(side, SMALLEST), longest)
    size = tuple(max(1, round(length * wanted / side)) for length in image.size)
    filter = Image.Resampling.LANCZOS if wanted < side else Image.Resampling.BICUBIC
    return image.convert("RGB").resize(size, filter)  # type: ignore[arg-type]


def _text_height(picture: Image.Image) -> int:
    return max(12, round(max(picture.size) / TEXT_SHARE))


def _font(picture: Image.Image) -> ImageFont.FreeTypeFont:
    return _font_of_size(round(0.95 * _text_height(picture)))


@lru_cache(maxsize=8)
def _font_of_size(size: int) -> ImageFont.FreeTypeFont:
    """Returns a font that comes with matplotlib, so that pictures are the same everywhere."""
    import matplotlib

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", size)


def _with_masks(picture: Image.Image, masks: Tensor, colors: Sequence[Color]) -> Image.Image:
    """Fills masks [N, H, W] with transparent color and outlines each, so that neighbors of a class are told apart."""
    pixels, size = pil_to_tensor(picture), (picture.height, picture.width)
    line = max(1, max(picture.size) // 480)
    chunk = max(1, DRAWN_TOGETHER // (picture.height * picture.width))
    for start in range(0, len(masks), chunk):
        few = masks[start : start + chunk, None].to(torch.uint8)
        scaled = F.interpolate(few, size=size, mode="nearest-exact")[:, 0].bool()
        few_colors = list(colors[start : start + chunk])
        pixels = draw_segmentation_masks(pixels, scaled, alpha=0.35, colors=few_colors)
        pixels = draw_segmentation_masks(pixels, scaled & ~_eroded(scaled, line), alpha=1.0, colors=few_colors)
    return to_pil_image(pixels)


def _eroded(masks: Tensor, pixels: int) -> Tensor:
    """Returns masks [N, H, W] without the pixels at their edges. Those at the edge of the image stay."""
    for _ in range(pixels):
        inside = masks.clone()
        inside[:, 1:] &= masks[:, :-1]
        inside[:, :-1] &= masks[:, 1:]
        inside[:, :, 1:] &= masks[:, :, :-1]
        inside[:, :, :-1] &= masks[:, :, 1:]
        masks = inside
    return masks


def _with_boxes(picture: Image.Image, boxes: Tensor, colors: Sequence[Color], *, thin: bool) -> Image.Image:
    """Draws boxes, with a dark edge that shows them on any background unless they are thin."""
    limits = torch.tensor([picture.width - 1, picture.height - 1, picture.width - 1, picture.height - 1])
    boxes = torch.minimum(boxes.clamp_min(0), limits)
    pixels = pil_to_tensor(picture)
    if thin:
        return to_pil_image(draw_bounding_boxes(pixels, boxes, colors=list(colors), width=max(picture.size) // 960 + 1))
    line = max(2, max(picture.size) // 320)
    edge = max(1, line // 2)
    outer = torch.tensor([-edge, -edge, edge, edge])
    pixels = draw_bounding_boxes(pixels, boxes + outer, colors=(25, 25, 25), width=line + 2 * edge)
    return to_pil_image(draw_bounding_boxes(pixels, boxes, colors=list(colors), width=line))


def _write_texts(
    picture: Image.Image, boxes: Tensor, labels: Sequence[int], scores: Sequence[float] | None, classes: Sequence[str]
) -> None:
    """Writes the class and the score of each box where there is room."""
    font, height, draw = _font(picture), _text_height(picture), ImageDraw.Draw(picture)
    order = range(len(labels)) if scores is None else sorted(range(len(labels)), key=lambda i: -scores[i])
    taken: list[Area] = []
    corners = boxes.numpy()
    for index in order:
        texts = [] if scores is None else [f"{scores[index]:.2f}"]
        if len(classes) > 1:  # otherwise the legend has the name
            texts.insert(0, " ".join([classes[labels[index]], *texts]))
        placed = next(
            (
                (text, area)
                for text in texts
                for area in _places(corners[index].tolist(), font.getlength(text) + height // 2, height, picture)
                if not any(_overlap(area, other) for other in taken) and not _hides(area, corners)
            ),
            None,
        )
        if placed is None:
            continue
        text, area = placed
        taken.append(area)
        color = class_color(labels[index])
        dark = np.dot(color, (0.299, 0.587, 0.114)) < 140
        draw.rectangle(area, fill=color)
        draw.text((area[0] + height // 4, (area[1] + area[3]) / 2), text, "white" if dark else "black", font, "lm")


def _places(box: Sequence[float], width: float, height: float, picture: Image.Image) -> list[Area]:
    """Returns where the text of a box can be: above it, inside at the top, below it; inside the picture."""
    left = min(max(0.0, box[0]), max(0.0, picture.width - width))
    tall = round(1.15 * height)
    inside = [box[1]] if box[2] - box[0] >= width and box[3] - box[1] >= 2 * tall else []
    tops = [box[1] - tall, *inside, box[3]]
    return [(left, top, left + width, top + tall) for top in tops if top >= 0 and top + tall <= picture.height]


def _overlap(first: Area, second: Area) -> bool:
    return first[0] < second[2] and second[0] < first[2] and first[1] < second[3] and second[1] < first[3]


def _hides(area: Area, boxes: np.ndarray) -> bool:
    """Whether a text covers more than `MOST_COVERED` of any of the boxes [N, 4]."""
    sides = np.minimum(boxes[:, 2:], area[2:]) - np.maximum(boxes[:, :2], area[:2])
    covered = sides.clip(min=0).prod(axis=1)
    return bool((covered > MOST_COVERED * (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)).any())
