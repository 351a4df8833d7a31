"""The perturbations of a robustness evaluation (CB, Section 4.6): their names, their strengths and whose they are.

`PERTURBATIONS` is the table. Every row applies a function of `perturbations` or `attacks` to a batch. Strengths of the
rows are:

- occlusion: half the side, CB's 112 of 224 pixels. CB sets the pixels to zero and does not say whether before or after
  the normalization: ``occlusion`` is black, and ``gray_occlusion`` is the mean of the normalization, zero after it.
- Gaussian noise: 5/255 and 10/255 are those of CB's Table 9, the others the five severities of ImageNet-C.
- shot noise and Gaussian blur: the five severities of ImageNet-C, of which the blurs of 1 and 2 pixels are also those
  of CB's Table 9. CB does not give the strength of its shot noise.
- FGSM and PGD: ours; CB does not give the epsilon of its FGSM.

The severities of ImageNet-C are those of its authors' program (make_imagenet_c.py), for images of 224 x 224 pixels.
Unlike the files of ImageNet-C, the perturbed images are not compressed as JPEG.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .attacks import Loss, fgsm, pgd
from .perturbations import gaussian_blur, gaussian_noise, occlude_center, shot_noise

LEVELS = 255  # strengths of noise and of attacks are given on the scale of bytes


@dataclass(frozen=True)
class Inputs:
    """A batch of images and what perturbations need to know about it.

    Args:
        images: [B, C, H, W], with values from 0 to 1.
        sizes: height and width of each image. Images are padded at the right and at the bottom.
        seeds: the seed of each image.
        mean: the mean of the normalization, [C], on the scale of the images.
        loss: the loss of such a batch, a scalar. See `attacks`.
    """

    images: Tensor
    sizes: Sequence[tuple[int, int]]
    seeds: Sequence[int]
    mean: Tensor
    loss: Loss


@dataclass(frozen=True)
class Perturbation:
    """A way to perturb images, at several strengths.

    Args:
        name: the name in options and JSON.
        title: the name in tables.
        apply: returns the perturbed images of a batch, given a strength.
        strengths: the strengths, from the weakest to the strongest.
        form: the format of a strength.
        unit: what a strength is, for the axis of a plot.
        source: whose strengths the default ones are.
        random: whether it draws random numbers.
        attacks: whether it depends on the network.
        most: the largest possible strength.
    """

    name: str
    title: str
    apply: Callable[[Inputs, float], Tensor]
    strengths: tuple[float, ...]
    form: str
    unit: str
    source: str
    random: bool = False
    attacks: bool = False
    most: float = math.inf

    def label(self, strength: float) -> str:
        """Formats a strength for tables: sigma 5/255."""
        return self.form.format(strength)

    def with_strengths(self, strengths: Sequence[float]) -> Perturbation:
        """Returns the perturbation with other strengths."""
        for strength in strengths:
            if not 0 < strength <= self.most or math.isinf(strength):
                limit = "" if math.isinf(self.most) else f" and at most {self.most:g}"
                raise ValueError(f"expected strengths of {self.name} above 0{limit}, got {strength:g}")
        return dataclasses.replace(self, strengths=tuple(dict.fromkeys(float(strength) for strength in strengths)))


def _without_padding(inputs: Inputs, perturb: Callable[[Tensor, Sequence[int]], Tensor]) -> Tensor:
    """Perturbs images of a batch: together if they have the same size, and otherwise one by one without the padding."""
    if all(tuple(size) == tuple(inputs.images.shape[-2:]) for size in inputs.sizes):
        return perturb(inputs.images, inputs.seeds)
    perturbed = inputs.images.clone()
    for index, (height, width) in enumerate(inputs.sizes):
        image = inputs.images[index : index + 1, :, :height, :width]
        perturbed[index : index + 1, :, :height, :width] = perturb(image, inputs.seeds[index : index + 1])
    return perturbed


def _occlusion(inputs: Inputs, strength: float) -> Tensor:
    return _without_padding(inputs, lambda images, seeds: occlude_center(images, strength))


def _gray_occlusion(inputs: Inputs, strength: float) -> Tensor:
    return _without_padding(inputs, lambda images, seeds: occlude_center(images, strength, inputs.mean))


def _gaussian_noise(inputs: Inputs, strength: float) -> Tensor:
    return _without_padding(inputs, lambda images, seeds: gaussian_noise(images, strength / LEVELS, seeds))


def _shot_noise(inputs: Inputs, strength: float) -> Tensor:
    return _without_padding(inputs, lambda images, seeds: shot_noise(images, strength, seeds))


def _gaussian_blur(inputs: Inputs, strength: float) -> Tensor:
    return _without_padding(inputs, lambda images, seeds: gaussian_blur(images, strength))


def _fgsm(inputs: Inputs, strength: float) -> Tensor:
    return fgsm(inputs.loss, inputs.images, strength / LEVELS)


def _pgd(inputs: Inputs, strength: float) -> Tensor:
    return pgd(inputs.loss, inputs.images, strength / LEVELS, seeds=inputs.seeds)


SIDE, EPSILON = "fraction of the side", "epsilon in 255ths"
SEVERITIES = "the five severities of ImageNet-C"
PERTURBATIONS = {
    row.name: row
    for row in (
        Perturbation(
            "occlusion", "center occlusion, black", _occlusion, (0.5,), "{:g} of the side", SIDE,
            "CB, Table 8", most=1.0,
        ),
        Perturbation(
            "gray_occlusion", "center occlusion, mean color", _gray_occlusion, (0.5,), "{:g} of the side", SIDE,
            "CB, Table 8", most=1.0,
        ),
        Perturbation(
            "gaussian_noise", "Gaussian noise", _gaussian_noise, (5.0, 10.0, 20.4, 30.6, 45.9, 66.3, 96.9),
            "sigma {:g}/255", "sigma in 255ths", f"5 and 10: CB, Table 9; the others: {SEVERITIES}", random=True,
        ),
        Perturbation(
            "shot_noise", "shot noise", _shot_noise, (60.0, 25.0, 12.0, 5.0, 3.0), "{:g} photons", "photons",
            SEVERITIES, random=True,
        ),
        Perturbation(
            "gaussian_blur", "Gaussian blur", _gaussian_blur, (1.0, 2.0, 3.0, 4.0, 6.0), "sigma {:g} px",
            "sigma in pixels", f"{SEVERITIES}; 1 and 2: also CB, Table 9",
        ),
        Perturbation(
            "fgsm", "FGSM", _fgsm, (1.0, 2.0, 4.0, 8.0), "epsilon {:g}/255", EPSILON, "ours", attacks=True, most=255.0,
        ),
        Perturbation(
            "pgd", "PGD, 10 steps", _pgd, (0.5, 1.0, 2.0), "epsilon {:g}/255", EPSILON, "ours", random=True,
            attacks=True, most=255.0,
        ),
    )
}  # fmt: skip


def parse_perturbations(texts: Sequence[str]) -> list[Perturbation]:
    """Returns the perturbations that a user names: ``NAME``, or ``NAME=STRENGTH,STRENGTH``; all of them if none is.

    >>> [row.strengths for row in parse_perturbations(["fgsm", "gaussian_blur=0.5,1"])]
    [(1.0, 2.0, 4.0, 8.0), (0.5, 1.0)]
    """
    found: dict[str, Perturbation] = {}
    for text in texts:
        name, given, strengths = text.partition("=")
        if name not in PERTURBATIONS:
            raise ValueError(f"unknown perturbation {name!r}; expected one of {', '.join(PERTURBATIONS)}")
        if name in found:
            raise ValueError(f"{name} is given twice: list its strengths as {name}=STRENGTH,STRENGTH")
        row = PERTURBATIONS[name]
        try:
            values = [float(strength) for strength in strengths.split(",")] if given else row.strengths
        except ValueError:
            raise ValueError(f"expected {name}=STRENGTH,STRENGTH with numbers, got {text!r}") from None
        found[name] = row.with_strengths(values)
    return list(found.values()) or list(PERTURBATIONS.values())


@dataclass(frozen=True)
class PerturbedScore:
    """The value of a metric on perturbed images.

    Args:
        values: the value of each repetition; a single one if nothing is random.
        mean: their mean.
        half_width: half the width of the confidence interval of the mean; None for a single value.
    """

    values: tuple[float, ...]
    mean: float
    half_width: float | None


def as_pictures(images: Tensor) -> Tensor:
    """Returns images with values from 0 to 1 as bytes [B, H, W, C]."""
    return (images.detach().clamp(0, 1) * LEVELS).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()
