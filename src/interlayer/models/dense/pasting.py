"""The masks of detected objects in the pixels of their image, for all objects at once.

torchvision resizes the mask of one object at a time, and the GPU is waited for a dozen times for each, because the
image is sliced by tensors. A microscope image has hundreds of objects. The values here are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.models.detection.roi_heads import expand_boxes, expand_masks
from torchvision.models.detection.transform import GeneralizedRCNNTransform

MOST_ELEMENTS = 2**26  # of masks that are computed at once


class MaskPasting(GeneralizedRCNNTransform):
    """torchvision's transform, which returns the masks of objects without waiting for the GPU for each."""

    def postprocess(
        self,
        result: list[dict[str, Tensor]],
        image_shapes: list[tuple[int, int]],
        original_image_sizes: list[tuple[int, int]],
    ) -> list[dict[str, Tensor]]:
        on_gpu = any("masks" in entry and entry["masks"].is_cuda for entry in result)
        if self.training or not on_gpu or torch.jit.is_tracing() or torch.compiler.is_compiling():
            return super().postprocess(result, image_shapes, original_image_sizes)
        all_masks = [entry.pop("masks") for entry in result]
        result = super().postprocess(result, image_shapes, original_image_sizes)
        for entry, masks, size in zip(result, all_masks, original_image_sizes, strict=True):
            entry["masks"] = paste_masks(masks, entry["boxes"], size)
        return result


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Computes the masks of objects, [N, 1, H, W], like torchvision's `paste_masks_in_image`.

    A mask is padded by a pixel of zeros, its box is enlarged accordingly and rounded to whole pixels, and the mask is
    resized to it bilinearly. It is zero outside of the box.

    Args:
        masks: The masks of the objects inside their boxes, [N, 1, M, M].
        boxes: The boxes in pixels of the image, [N, 4].
        size: H and W.
    """
    pasted = masks.new_empty((len(masks), 1, *size))
    padded, scale = expand_masks(masks, padding=1)
    padded = padded[:, 0].to(torch.promote_types(masks.dtype, torch.float32))
    left, top, right, bottom = expand_boxes(boxes, scale).to(torch.int64).unbind(1)
    side = padded.shape[-1]
    rows = _interpolation(top, bottom, size[0], side, padded.dtype)
    columns = _interpolation(left, right, size[1], side, padded.dtype)
    at_once = max(1, MOST_ELEMENTS // max(1, size[0] * size[1]))
    for start in range(0, len(masks), at_once):
        part = slice(start, start + at_once)
        first, second, weight = (values[part, :, None] for values in rows)
        lines = _between(padded[part], 1, first.expand(-1, -1, side), second.expand(-1, -1, side), weight)
        first, second, weight = (values[part, None] for values in columns)
        shape = len(lines), *size
        pasted[part, 0] = _between(lines, 2, first.expand(shape), second.expand(shape), weight)
    return pasted


def _interpolation(
    first: Tensor, last: Tensor, length: int, side: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns how the pixels of one axis of the image are interpolated from a mask that is resized to a box.

    Args:
        first: The first pixel of each box, [N].
        last: The last pixel of each box, [N].
        length: The number of pixels of the image.
        side: The number of pixels of the mask, of which the outer ones are zero.
        dtype: The dtype of the weights.

    Returns:
        For each pixel of the image, [N, length], the two pixels of the mask between which it lies, and the weight of
        the second one. Pixels outside of the box get an outer pixel.
    """
    places = torch.arange(length, device=first.device)
    extent = (last - first + 1).clamp(min=1)[:, None]
    position = ((places - first[:, None]).to(dtype) + 0.5) * (side / extent.to(dtype)) - 0.5
    inside = (places >= first[:, None]) & (places <= last[:, None])
    position = torch.where(inside, position.clamp(min=0), 0)
    lower = position.to(torch.int64).clamp(max=side - 1)
    return lower, (lower + 1).clamp(max=side - 1), position - lower


def _between(values: Tensor, axis: int, first: Tensor, second: Tensor, weight: Tensor) -> Tensor:
    return values.gather(axis, first).lerp_(values.gather(axis, second), weight)
