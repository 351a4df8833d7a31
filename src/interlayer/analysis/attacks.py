"""Adversarial attacks: changes of an image, of at most epsilon in every value, that raise the loss of a network.

Images are [B, C, H, W] with values from 0 to 1: the network that is attacked includes the normalization. An attack is
given as its loss, a function of such images that returns a scalar. The loss of a batch must be a sum of losses of
images, as cross-entropy is: only the sign of its gradient is used, so that the factors do not matter.

- FGSM (Goodfellow et al., 2015; CB, Section 4.6 and Table 8): x' = clip(x + epsilon sign(d loss / d x)).
- PGD (Madry et al., 2018): x' starts at a random point within epsilon of x and takes steps of the same form, each
  projected back to within epsilon of x.

Results are not rounded to bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .perturbations import drawn

Loss = Callable[[Tensor], Tensor]
STEPS = 10
TRAVEL = 2.5  # total length of the steps of PGD, in epsilon: it can reach any corner of the cube from any start


def fgsm(loss: Loss, images: Tensor, epsilon: float) -> Tensor:
    """Returns the images after one step of the fast gradient sign method.

    Args:
        loss: the loss of a batch of images with values from 0 to 1.
        images: [B, C, H, W].
        epsilon: the change of every value.
    """
    return (images + epsilon * _gradient_sign(loss, images)).clamp(0, 1)


def pgd(
    loss: Loss,
    images: Tensor,
    epsilon: float,
    *,
    seeds: Sequence[int] | None = None,
    steps: int = STEPS,
    step_size: float | None = None,
) -> Tensor:
    """Returns the images after projected gradient descent within the cube of half-width ``epsilon`` around them.

    Args:
        loss: the loss of a batch of images with values from 0 to 1.
        images: [B, C, H, W].
        epsilon: the largest change of a value.
        seeds: the seed of each image's random start; if None, the attack starts at the image itself.
        steps: the number of steps.
        step_size: the change of every value in a step; 2.5 epsilon / steps if None.
    """
    step_size = TRAVEL * epsilon / steps if step_size is None else step_size
    attacked = images if seeds is None else _random_start(images, epsilon, seeds)
    for _ in range(steps):
        moved = attacked + step_size * _gradient_sign(loss, attacked)
        attacked = (images + (moved - images).clamp(-epsilon, epsilon)).clamp(0, 1)
    return attacked


def _random_start(images: Tensor, epsilon: float, seeds: Sequence[int]) -> Tensor:
    """Returns a point of the cube of half-width ``epsilon`` around every image, from the uniform distribution."""
    start = drawn(images, seeds, lambda image, generator: torch.empty_like(image).uniform_(-1, 1, generator=generator))
    return (images + epsilon * start).clamp(0, 1)


def _gradient_sign(loss: Loss, images: Tensor) -> Tensor:
    """Returns the sign of the gradient of the loss. Gradients of parameters are neither computed nor changed."""
    with torch.enable_grad():
        attacked = images.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(attacked), attacked)
    if gradient.isnan().any():  # its sign would be NaN, and the network would seem to be fooled
        raise ValueError("the gradient of the loss by the images is not a number: the network cannot be attacked")
    return gradient.sign()
