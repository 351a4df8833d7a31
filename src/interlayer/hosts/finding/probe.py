"""Runs a model to inspect its structure, without changing it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..carried import Grid


class AttachError(ValueError):
    """The mechanism cannot be attached to the network. The message gives the reason."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set the model to eval mode inside the `with` block, and restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def probe_image(model: nn.Module, image_size: int | Grid | None = None) -> Tensor:
    """Returns one random image of the model's input size, device and dtype."""
    first = next((p for p in model.parameters() if p.dim() > 1 and p.is_floating_point()), None)
    if first is None:
        raise AttachError(f"{type(model).__name__} has no weights")
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    channels, height, width = config.get("input_size") or _configured_size(model)
    embed = next((m for m in model.modules() if getattr(m, "img_size", None) and hasattr(m, "grid_size")), None)
    if embed is not None:
        height, width = checked_size(embed.img_size)  # type: ignore[arg-type]
    if image_size is not None:
        height, width = checked_size(image_size)
    generator = torch.Generator(device="cpu").manual_seed(0)

    def image_of(channels: int) -> Tensor:
        image = torch.randn(1, channels, height, width, generator=generator, device="cpu")
        return image.to(device=first.device, dtype=first.dtype)

    convolution = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if convolution is not None and convolution.in_channels != channels:
        # Either in_chans differs from the default, or the stem rearranges pixels before it convolves. Running decides.
        with evaluating(model), torch.no_grad(), suppress(Exception):
            model(image_of(convolution.in_channels))
            channels = convolution.in_channels
    return image_of(channels)


def _configured_size(model: nn.Module) -> tuple[int, int, int]:
    """Returns channels, height and width of the images that the configuration of a transformers model states."""
    for module in model.modules():
        config = getattr(module, "config", None)
        size = getattr(config, "image_size", None)
        if isinstance(size, int) or (isinstance(size, (list, tuple)) and len(size) == 2):
            return (getattr(config, "num_channels", 3), *checked_size(size))
    return 3, 224, 224


def run_once(model: nn.Module, image_size: int | Grid | None = None) -> None:
    """Run the model in eval mode on one image, and on two text tokens if it is a ViLT."""
    with evaluating(model), torch.no_grad():
        vilt = vilt_of(model)
        if vilt is None:
            model(probe_image(model, image_size))
            return
        config, first = vilt.config, next(vilt.parameters())
        size = checked_size(config.image_size)
        words = torch.zeros(1, 2, dtype=torch.long, device=first.device)
        vilt(input_ids=words, pixel_values=first.new_zeros(1, config.num_channels, *size))


def vilt_of(model: nn.Module) -> Any:
    """Returns the ViltModel in `model`, or None."""
    vilts = (m for m in model.modules() if type(m).__name__ == "ViltModel" and m.__module__.startswith("transformers."))
    return next(vilts, None)


def match(mechanism: nn.Module, place: nn.Module) -> None:
    """Move a new mechanism to the device, dtype and mode of the module that it is attached to."""
    reference = next(p for p in place.parameters() if p.is_floating_point())
    mechanism.to(device=reference.device, dtype=reference.dtype).train(place.training)


def reason(error: Exception) -> str:
    """Returns the message of an error on one line, or its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def checked_size(size: int | Sequence[int]) -> Grid:
    """Returns height and width of an image, given one number or two."""
    sides = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, Sequence) else ()
    whole = all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides)
    if len(sides) != 2 or not whole or isinstance(size, str):
        raise AttachError(
            f"image_size must be a positive whole number, or height and width such as (224, 320), got {size!r}"
        )
    return int(sides[0]), int(sides[1])
