"""Corruptions of images: occlusion, noise and blur. They do not depend on the network.

Images are [B, C, H, W] with values from 0 to 1, before normalization, and so are the results. Noise is drawn for each
image from a generator of its own, so that it depends on the seed of the image and on the type of the device, not on the
batch in which the image is.

Context broadcasting (CB, Section 4.6) evaluates with center occlusion, shot noise, Gaussian noise and Gaussian blur.
The equations of noise and blur are those of ImageNet-C (Hendrycks and Dietterich, 2019), which CB cites.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

TRUNCATED = 4.0  # standard deviations at which the kernel of a blur ends, as in scipy and scikit-image


def occlude_center(images: Tensor, side: float = 0.5, fill: Tensor | float = 0.0) -> Tensor:
    """Replaces the center of every image (CB, Section 4.6 and Table 8: 112 x 112 of 224 x 224 pixels).

    Args:
        images: [B, C, H, W].
        side: the height and width of the occlusion, as a fraction of those of the image.
        fill: the value of occluded pixels; a tensor [C] gives a value for each channel.
    """
    if not 0 < side <= 1:
        raise ValueError(f"expected side between 0 and 1, got {side:g}")
    (top, bottom), (left, right) = (_middle(length, side) for length in images.shape[-2:])
    occluded = images.clone()
    value = fill.to(images).view(-1, 1, 1) if isinstance(fill, Tensor) else fill
    occluded[..., top:bottom, left:right] = value
    return occluded


def _middle(length: int, side: float) -> tuple[int, int]:
    """Returns the first and the last index, exclusive, of the middle of a row of pixels."""
    inside = round(side * length)
    first = (length - inside) // 2
    return first, first + inside


def gaussian_noise(images: Tensor, sigma: float, seeds: Sequence[int]) -> Tensor:
    """Adds Gaussian noise: clip(x + sigma n), with n from N(0, 1) for every pixel and channel.

    Args:
        images: [B, C, H, W].
        sigma: the standard deviation, on the scale of the images from 0 to 1.
        seeds: the seed of each image's noise.
    """
    noise = drawn(images, seeds, lambda image, generator: torch.empty_like(image).normal_(generator=generator))
    return (images + sigma * noise).clamp(0, 1)


def shot_noise(images: Tensor, photons: float, seeds: Sequence[int]) -> Tensor:
    """Replaces every value by a count of photons: clip(n / photons), with n from Poisson(photons x).

    Args:
        images: [B, C, H, W].
        photons: the expected count at the value 1. The fewer there are, the stronger is the noise.
        seeds: the seed of each image's noise.
    """
    if not photons > 0:
        raise ValueError(f"expected photons above 0, got {photons:g}")
    counts = drawn(images, seeds, lambda image, generator: torch.poisson(image * photons, generator=generator))
    return (counts / photons).clamp(0, 1)


def gaussian_blur(images: Tensor, sigma: float) -> Tensor:
    """Convolves every channel with a Gaussian. Beyond the border, the pixels of the border are repeated.

    Args:
        images: [B, C, H, W].
        sigma: the standard deviation of the Gaussian in pixels. Its kernel ends at four standard deviations.
    """
    if not sigma > 0:
        raise ValueError(f"expected sigma above 0, got {sigma:g}")
    return gaussian_smooth(images, sigma, math.floor(TRUNCATED * sigma + 0.5)).clamp(0, 1)


def gaussian_smooth(images: Tensor, sigma: float, radius: int) -> Tensor:
    """Convolves every channel with a Gaussian, as `gaussian_blur` does, for images of any range of values.

    Args:
        images: [B, C, H, W].
        sigma: the standard deviation of the Gaussian in pixels.
        radius: the number of pixels on either side of the center at which its kernel ends.
    """
    offsets = torch.arange(-radius, radius + 1, dtype=torch.float64, device=images.device)
    kernel = torch.exp(-0.5 * (offsets / sigma) ** 2)
    kernel = (kernel / kernel.sum()).to(images.dtype).view(1, 1, -1)
    smooth = images
    for axis in (-1, -2):
        rows = smooth.transpose(axis, -1)
        padded = F.pad(rows.flatten(0, -2)[:, None], (radius, radius), mode="replicate")
        smooth = F.conv1d(padded, kernel).view(rows.shape).transpose(axis, -1)
    return smooth


def drawn(images: Tensor, seeds: Sequence[int], draw: Callable[[Tensor, torch.Generator], Tensor]) -> Tensor:
    """Draws random numbers for each image from a generator of its own, and stacks them.

    Args:
        images: [B, C, H, W].
        seeds: the seed of each image.
        draw: returns the random numbers of an image [C, H, W], given the image and a generator on its device.
    """
    if len(seeds) != len(images):
        raise ValueError(f"expected a seed for each of {len(images)} images, got {len(seeds)} seeds")
    generators = [torch.Generator(images.device).manual_seed(seed) for seed in seeds]
    return torch.stack([draw(image, generator) for image, generator in zip(images, generators, strict=True)])
