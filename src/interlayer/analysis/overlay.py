"""Heatmaps over photographs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = "turbo"  # matplotlib's name of the color map
OPACITY = 0.5  # of the heatmap
MARK = "#ff1a1a"


def overlay(picture: Tensor, heatmap: Tensor, *, opacity: float = OPACITY) -> Image.Image:
    """Draws a heatmap over a picture.

    Args:
        picture: the picture as bytes, [3, H, W].
        heatmap: values from 0 to 1, [h, w]. A smaller map is enlarged without interpolation, so that its cells can be
            told apart.
        opacity: how much of the heatmap is seen: 0 shows the picture alone, 1 the heatmap alone.
    """
    from matplotlib import colormaps

    height, width = picture.shape[1:]
    colors = torch.as_tensor(colormaps[COLORS](heatmap.detach().cpu().float().numpy()))[..., :3]  # [h, w, 3]
    enlarged = torch.nn.functional.interpolate(
        colors.permute(2, 0, 1)[None], size=(height, width), mode="nearest-exact"
    )
    mixed = (1 - opacity) * picture.cpu() + opacity * 255 * enlarged[0]
    return Image.fromarray(mixed.round().clamp(0, 255).byte().permute(1, 2, 0).numpy())


def color_scale(figure: Figure, image: Any, label: str, **options: Any) -> Any:
    """Returns the color bar of a heatmap over a photograph. Its colors are opaque, as if nothing were below them.

    Args:
        figure: the figure.
        image: the heatmap, as `imshow` returns it.
        label: what the colors show.
        options: of `Figure.colorbar`.
    """
    bar = figure.colorbar(image, pad=0.01, **options)
    if bar.solids is not None:
        bar.solids.set_alpha(1.0)
    bar.set_label(label, fontsize=8)
    return bar


def mark_box(image: Image.Image, box: tuple[float, float, float, float] | None) -> Image.Image:
    """Returns an image with a red box.

    Args:
        image: the image.
        box: top, left, height and width as fractions of the image, as `QueryAttention.box`; None for no box.
    """
    if box is None:
        return image
    width, height = image.size
    top, left, bottom, right = box[0], box[1], box[0] + box[2], box[1] + box[3]
    corners = [round(left * width), round(top * height), round(right * width) - 1, round(bottom * height) - 1]
    marked = image.copy()
    ImageDraw.Draw(marked).rectangle(corners, outline=MARK, width=max(1, min(width, height) // 112))
    return marked
