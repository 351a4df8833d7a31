"""Chooses the layer of a class activation map by the structure of the network.

The default is the last map before the classifier's pooling, which says most about the class and still says where: the
end of the last stage, or what follows it, such as the last convolution of an EfficientNet.

In a transformer that reads its class from a prefix token, the patch tokens that leave the last block reach no output,
and a map of them would be blank. They are read for the last time by the attention of the last block, so the layer is
the norm in front of it. Whether the patch tokens of a layer reach the score of a class is seen from the gradient of
that score.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..hosts.finding.feature_maps import FeatureMap, FoundMaps
from .capture import capture


def choose_layer(
    model: nn.Module, image: Tensor, score: Callable[[Tensor], Tensor], layer: int | str | None = None
) -> FeatureMap:
    """Returns the layer of a class activation map.

    Args:
        model: the network, in eval mode.
        image: one image, [1, C, H, W].
        score: runs the network on such an image and returns the score of a class, a scalar with a graph.
        layer: None for the last map before the pooling; the number of a stage, counted from 1 or backwards from -1, or
            "stage3" or "3"; or the name of a module.

    Raises:
        ValueError: there is no such stage or module, or its output has no spatial structure.
    """
    found = FoundMaps(model, image)
    is_module = any(call.name == layer for call in found.calls)  # also if it is called "1" or "stage4"
    number = None if is_module else _stage_number(layer)
    if number is not None:
        chosen = _last_reaching(found, image, score, _stage(found, number))
    elif layer is not None:
        chosen = found.named(str(layer))
    elif found.stages:
        last = found.stages[-1]
        chosen = _last_reaching(found, image, score, [*last, *found.following(last[-1])])
    else:
        chosen = found.last()
    if chosen.resolution == (1, 1):
        raise ValueError(
            f"the map of {chosen.name} is 1 x 1 and cannot say where: use larger images, or name an earlier layer"
        )
    return chosen


def _stage_number(layer: int | str | None) -> int | None:
    """Returns the number of a stage, or None if a layer is given in another way."""
    if isinstance(layer, int):
        return layer
    match = re.fullmatch(r"(?:stage *)?(-?\d+)", layer or "")
    return int(match[1]) if match else None


def _stage(found: FoundMaps, number: int) -> list[FeatureMap]:
    stages = found.stages
    if not stages:
        raise ValueError(f"{found.reason}; name a layer by the name of a module")
    if not 1 <= abs(number) <= len(stages):
        ends = ", ".join(f"{index} ({stage[-1].name})" for index, stage in enumerate(stages, 1))
        raise ValueError(f"stage {number} does not exist: the stages and their last blocks are {ends}")
    return stages[number - 1 if number > 0 else number]


def _last_reaching(
    found: FoundMaps, image: Tensor, score: Callable[[Tensor], Tensor], places: list[FeatureMap]
) -> FeatureMap:
    """Returns the last of the places, or of the norms inside them, whose patch tokens reach the score of the class."""
    if not any(place.layout.kind == "tokens" and place.layout.prefix for place in places):
        return places[-1]
    candidates: list[FeatureMap] = []
    for place in reversed(places):
        reading = found.reading(place)
        candidates += [place] if reading is None else [place, reading]
    with capture(found.model, [each.name for each in candidates], detach=False) as captured, torch.enable_grad():
        value = score(image.detach().requires_grad_().clone())
        tensors = [_tensor(captured[each.name][0]) for each in candidates]
        gradients = torch.autograd.grad(value, tensors, allow_unused=True)
    for candidate, gradient in zip(candidates, gradients, strict=True):
        if gradient is not None and candidate.of(gradient).any():
            return candidate
    names = f"{places[0].name} to {places[-1].name}" if len(places) > 1 else places[0].name
    raise ValueError(f"no patch token of {names} reaches the score of the class: choose another layer")


def _tensor(value: object) -> Tensor:
    first = value[0] if isinstance(value, (tuple, list)) else value
    assert isinstance(first, Tensor)
    return first
