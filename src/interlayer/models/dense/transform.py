"""Normalizes, resizes and batches the images of a detector.

torchvision's transform copies the mean, the standard deviation and the sizes of every image to the GPU, and waits for
each copy. Here the mean and the standard deviation lie on the device of the detector, and an image that has the wanted
size already is not resized. The results are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .pasting import MaskPasting


class DetectorTransform(MaskPasting):
    """torchvision's transform with fewer copies.

    Args:
        min_size: length of the short side of resized images.
        max_size: largest length of the long side of resized images.
        mean: channel means of the images.
        std: channel standard deviations of the images.
        size_divisible: batches are padded to multiples of it.
        resizes: whether images are resized.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        min_size: int | Sequence[int],
        max_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        size_divisible: int,
        resizes: bool,
    ) -> None:
        super().__init__(min_size, max_size, list(mean), list(std), size_divisible=size_divisible)
        self.resizes = resizes
        self.register_buffer("mean", torch.tensor(list(mean)).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(list(std)).view(-1, 1, 1), persistent=False)

    def normalize(self, image: Tensor) -> Tensor:
        if not image.is_floating_point() or image.device != self.mean.device:
            return super().normalize(image)
        return (image - self.mean.to(image.dtype)) / self.std.to(image.dtype)

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        if not self.resizes or (len(self.min_size) == 1 and self._scale(image) == 1):
            return image, target
        return super().resize(image, target)

    def _scale(self, image: Tensor) -> float:
        short, long = sorted(image.shape[-2:])
        return min(self.min_size[0] / short, self.max_size / long)
