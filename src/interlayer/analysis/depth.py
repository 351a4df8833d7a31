"""Time and memory of a training step as a function of depth: one stage of T blocks, plain and with mechanisms.

The plain network, and a mechanism that every layer computes from the layer before, cost T times as much as one block. A
layer that reads all layers before it makes the time of the stage grow faster: the exponent of T says how much. Memory
is the peak of a step less weights and momentum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from timm.models.resnet import Bottleneck, ResNet
from torch import nn

from ..hosts import attach
from ..models.build import split_name
from .cost import Setting, measure
from .fits import exponent

EXPANSION = 4  # a bottleneck has as many channels as its convolutions have times this
REDUCTION = 4  # pixels of the image along one side of a pixel of the stage's maps


@dataclass(frozen=True)
class DepthCost:
    """Cost of a training step of one network.

    Args:
        name: the name of the network, which does not depend on its depth.
        blocks: T, the number of blocks of the stage.
        seconds: the median time of a step; NaN if the step did not fit in the memory of the device.
        memory: peak bytes of the step less weights and momentum; NaN if the step did not fit.
    """

    name: str
    blocks: int
    seconds: float
    memory: float

    @property
    def fits(self) -> bool:
        return not math.isnan(self.seconds)


def one_stage_network(blocks: int, channels: int, mechanism: str | None = None, *, map_size: int = 14) -> nn.Module:
    """Returns a ResNet with one stage of bottleneck blocks, for images four times as large as its maps.

    Args:
        blocks: T, the number of blocks, at least two.
        channels: the number of channels of the stage's maps, a multiple of four.
        mechanism: MECHANISM, or MECHANISM:OPTION=VALUE, to attach to the blocks; None for the plain network.
        map_size: height and width of the maps.
    """
    if blocks < 2:
        raise ValueError(f"expected a stage of at least two blocks, got {blocks}")
    if channels < EXPANSION or channels % EXPANSION:
        raise ValueError(f"expected a number of channels that is a multiple of {EXPANSION}, got {channels}")
    network = ResNet(Bottleneck, layers=(blocks,), channels=(channels // EXPANSION,), num_classes=10)
    network.layer2 = network.layer3 = network.layer4 = nn.Identity()  # which timm's forward pass expects
    for name, options in split_name(f"one_stage+{mechanism}")[1] if mechanism else ():
        attach(network, name, image_size=REDUCTION * map_size, **options)
    return network


def depth_costs(
    mechanisms: Mapping[str, str | None],
    depths: Sequence[int],
    setting: Setting,
    *,
    channels: int = 256,
    map_size: int = 14,
    progress: Callable[[str, int], None] = lambda name, blocks: None,
) -> Iterator[DepthCost]:
    """Yields the cost of a training step of each network, for one depth after the other.

    Args:
        mechanisms: for each network, by its name, MECHANISM or MECHANISM:OPTION=VALUE, or None for the plain network.
        depths: the numbers of blocks.
        setting: how steps are measured. Its image size is replaced by the one for ``map_size``.
        channels: the number of channels of the maps.
        map_size: height and width of the maps.
        progress: called with the name of the network and its number of blocks before each measurement.

    Raises:
        ValueError: a mechanism is not known or cannot be attached.
    """
    setting = replace(setting, image_size=REDUCTION * map_size)
    for blocks in depths:
        for name, mechanism in mechanisms.items():
            progress(name, blocks)
            network = one_stage_network(blocks, channels, mechanism, map_size=map_size)
            try:
                cost = measure(network, setting)
            except torch.OutOfMemoryError:
                yield DepthCost(name, blocks, math.nan, math.nan)
                continue
            finally:
                if setting.device.startswith("cuda"):
                    torch.cuda.empty_cache()
            # Weights and momentum. At the peak, when the backward pass starts, there are no gradients of weights.
            memory = cost.memory - 2 * sum(p.numel() * p.element_size() for p in network.parameters())
            yield DepthCost(name, blocks, cost.train_seconds, memory)


def depth_curves(costs: Sequence[DepthCost]) -> dict[str, list[DepthCost]]:
    """Returns the costs of each network by its name, in the order of depth, without steps that did not fit."""
    curves: dict[str, list[DepthCost]] = {}
    for cost in sorted(costs, key=lambda cost: cost.blocks):
        if cost.fits:
            curves.setdefault(cost.name, []).append(cost)
    order = list(dict.fromkeys(cost.name for cost in costs))
    return {name: curves[name] for name in order if name in curves}


def depth_exponents(curve: Sequence[DepthCost]) -> tuple[float, float]:
    """Returns the exponents of T in time and in memory; NaN with fewer than two depths."""
    if len({cost.blocks for cost in curve}) < 2:
        return math.nan, math.nan
    blocks = [cost.blocks for cost in curve]
    return exponent(blocks, [cost.seconds for cost in curve]), exponent(blocks, [cost.memory for cost in curve])
