"""How a detector takes the images of a padded batch that is already normalized."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .pasting import MaskPasting


def resized_size(height: int, width: int, short_side: int, long_side: int) -> tuple[int, int]:
    """Returns the height and width of an image whose shorter side is resized, unless its longer side is then longer.

    >>> resized_size(480, 640, 800, 1333), resized_size(480, 640, 800, 1000)
    ((800, 1067), (750, 1000))
    """
    scale = min(short_side / min(height, width), long_side / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def resize_image(image: Tensor, short_side: int, long_side: int) -> Tensor:
    """Resizes an image [C, H, W] with antialiasing, as training images are resized."""
    size = resized_size(image.shape[-2], image.shape[-1], short_side, long_side)
    if image.shape[-2:] == size:
        return image
    return F.interpolate(image[None].float(), size=size, mode="bilinear", align_corners=False, antialias=True)[0]


class NormalizedImages(MaskPasting):
    """Batches images [3, H, W] that are already normalized.

    Training images keep the size that the data gives them. In evaluation each image is resized once, and boxes and
    masks are returned in pixels of the image that was given.
    """

    def __init__(self, short_side: int, long_side: int, *, size_divisible: int) -> None:
        super().__init__(short_side, long_side, [0.0] * 3, [1.0] * 3, size_divisible=size_divisible)

    def normalize(self, image: Tensor) -> Tensor:
        return image

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        return (image if self.training else resize_image(image, self.min_size[-1], self.max_size)), target

    def batch_images(self, images: list[Tensor], size_divisible: int = 32) -> Tensor:
        height, width = (
            math.ceil(max(image.shape[axis] for image in images) / size_divisible) * size_divisible for axis in (1, 2)
        )
        first = images[0]
        layout = torch.channels_last if first.stride(0) == 1 else torch.contiguous_format
        shape = len(images), first.shape[0], height, width
        batch = torch.empty(shape, dtype=first.dtype, device=first.device, memory_format=layout).zero_()
        for row, image in zip(batch, images, strict=True):
            row[:, : image.shape[1], : image.shape[2]] = image
        return batch
