"""Where the tensors of a network come from: loaded from trained weights, or newly initialized.

`build_network` records the origin in the network. Fine-tuning reads it to give new parameters their own learning rate,
and to train them alone while the rest is frozen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .. import hosts
from ..mechanisms import BlockMechanism, UniformHeadAttention

ATTRIBUTE = "interlayer_origin"


@dataclass(frozen=True)
class Origin:
    """The origin of a network's tensors.

    Args:
        source: the trained weights: a file, timm's name of pretrained weights, or the name of a stored model; empty if
            there are none.
        loaded: names of the parameters and buffers that were loaded.
        classes: number of classes of a classifier of the weights that was not loaded because the network has another
            number; None if it was loaded, or if the weights have none.
        described: names of the mechanisms that a weights file describes, some of which have no tensors.
    """

    source: str = ""
    loaded: frozenset[str] = frozenset()
    classes: int | None = None
    described: frozenset[str] = frozenset()

    def new_parameters(self, network: nn.Module) -> dict[str, nn.Parameter]:
        """Returns the parameters of the network that were not loaded, by name."""
        return {name: parameter for name, parameter in network.named_parameters() if name not in self.loaded}


def record_origin(network: nn.Module, origin: Origin) -> None:
    """Records the origin in the network."""
    network.__dict__[ATTRIBUTE] = origin


def origin_of(network: nn.Module) -> Origin:
    """Returns the origin of a network, which may contain the network that `build_network` returned as a submodule."""
    for prefix, module in network.named_modules():
        origin = module.__dict__.get(ATTRIBUTE)
        if origin is not None:
            loaded = frozenset(f"{prefix}.{name}" if prefix else name for name in origin.loaded)
            described = frozenset(f"{prefix}.{name}" if prefix else name for name in origin.described)
            return Origin(origin.source, loaded, origin.classes, described)
    return Origin()


def untrained_mechanisms(network: nn.Module, origin: Origin) -> list[str]:
    """Returns the names of attached mechanisms that did not come from the trained weights."""
    return [
        name
        for name in hosts.attached_mechanisms(network)
        if name not in origin.described and not any(loaded.startswith(f"{name}.") for loaded in origin.loaded)
    ]


def new_mechanism_parameters(network: nn.Module, origin: Origin) -> list[nn.Parameter]:
    """Returns the parameters of attached mechanisms that did not come from the trained weights."""
    prefixes = tuple(f"{name}." for name in hosts.attached_mechanisms(network))
    return [p for name, p in origin.new_parameters(network).items() if name.startswith(prefixes)]


def changes_outputs(network: nn.Module, origin: Origin, size: int) -> bool:
    """Whether untrained mechanisms change what a network computes with trained weights.

    Args:
        size: height and width of the image on which the network is run with and without its mechanisms.
    """
    untrained = untrained_mechanisms(network, origin)
    if not origin.source or not untrained:
        return False
    attached = hosts.attached_mechanisms(network)
    if not all(isinstance(attached[name], BlockMechanism) for name in untrained):  # it replaces layers of the network
        return True
    image = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    forward: Any = getattr(network, "forward_features", network)  # a classifier of zeros would hide every change
    with torch.no_grad(), hosts.evaluating(network):
        with hosts.switched_off(network):
            without = forward(image)
        outputs = forward(image)
    pairs = zip(tree_leaves(outputs), tree_leaves(without), strict=True)
    return not all(torch.allclose(a, b, atol=1e-4) for a, b in pairs if isinstance(a, Tensor))


def all_tensors(network: nn.Module) -> Iterator[tuple[str, object]]:
    """Yields name and tensor of all parameters and buffers."""
    yield from network.named_parameters()
    yield from network.named_buffers()


def taken_over(network: nn.Module, names: Collection[str]) -> set[str]:
    """Returns the names of parameters that were computed from loaded weights of the layers they replace.

    Args:
        names: names of the loaded weights, including those of replaced layers.
    """
    layers = {
        name for name, layer in hosts.attached_mechanisms(network).items() if isinstance(layer, UniformHeadAttention)
    }
    prefixes = tuple(f"{layer}." for layer in layers if any(name.startswith(f"{layer}.") for name in names))
    return {name for name, _ in all_tensors(network) if name.startswith(prefixes)} if prefixes else set()
