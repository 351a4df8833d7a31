"""Replaces the spatial convolutions of a network by attention-augmented convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...mechanisms.augmented import AugmentedConv2d, AugmentedPosition
from ...mechanisms.options import OptionError, expect_flag, expect_positive, one_of, option
from ..carried import Grid
from ..finding.probe import AttachError, match
from .local_attention import spatial_convolutions
from .replaced import put_back, replace, replaced_layers


def _expect_fraction(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1:
        raise OptionError(f"{name} must be a fraction between 0 and 1, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class AugmentedOptions:
    """Options of attention-augmented convolutions."""

    stages: Sequence[int] | None = option(
        None, "numbers, from 1, of the stages in which 3x3 convolutions are augmented", shown="all but the first"
    )
    heads: int = option(8, "number of heads of every layer", check=expect_positive)
    key_ratio: float = option(
        0.2, "key channels as a fraction of the output channels, with at least 20 per head", check=_expect_fraction
    )
    value_ratio: float = option(
        0.1, "channels of attention as a fraction of the output channels", check=_expect_fraction
    )
    position: AugmentedPosition = option(
        "relative", 'position encoding: "relative" or "none"', check=one_of("relative", "none")
    )
    downsample: bool = option(
        True,
        "run the attention of the first of these stages, which has the largest maps, on maps of half the size",
        check=expect_flag,
    )


def place_augmented_convolutions(
    model: nn.Module, options: AugmentedOptions, *, image_size: int | Grid | None = None
) -> None:
    """Replace 3x3 convolutions of a network of residual stages by attention-augmented convolutions."""
    name = type(model).__name__
    found = spatial_convolutions(model, image_size)
    numbers = sorted({stage for stage, _, _, _ in found})
    if not found:
        raise AttachError(
            f"{name} has no 3x3 convolutions that attention could augment: with all channels in one group, in stages "
            f"that its feature_info lists and that are sequences of blocks"
        )
    stages = options.stages if options.stages is not None else numbers[1:] or numbers
    if not isinstance(stages, Sequence) or not stages or not all(stage in numbers for stage in stages):
        raise AttachError(f"{name} has stages {numbers[0]} to {numbers[-1]}, got stages={options.stages!r}")
    first = min(stages)
    layers = []
    for stage, path, conv, size in found:
        if stage in stages:
            try:
                layer = AugmentedConv2d(
                    conv,
                    size,
                    heads=options.heads,
                    key_ratio=options.key_ratio,
                    value_ratio=options.value_ratio,
                    position=options.position,
                    pooled=options.downsample and stage == first,
                )
            except ValueError as error:
                raise AttachError(f"{path} of {name} cannot be augmented: {error}") from error
            match(layer, conv)
            layers.append((path, layer))
    for path, layer in layers:
        replace(model, path, layer)


def augmented_convolutions(model: nn.Module) -> list[tuple[str, Any]]:
    """Returns name and module of every attention-augmented convolution."""
    return [(name, layer) for name, layer in replaced_layers(model) if isinstance(layer, AugmentedConv2d)]


def take_out_augmented_convolutions(model: nn.Module) -> None:
    """Undo `place_augmented_convolutions`: the convolutions are restored with their weights."""
    put_back(model, AugmentedConv2d)
