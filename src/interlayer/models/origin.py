"""Where the tensors of a network come from: loaded from trained weights, or newly initialized.

`build_network` records the origin in the network. Fine-tuning reads it to give new parameters their own learning rate,
and to train them alone while the rest is frozen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn

from .. import hosts
from ..mechanisms import UniformHeadAttention

ATTRIBUTE = "interlayer_origin"


@dataclass(frozen=True)
class Origin:
    """The origin of a network's tensors.

    Args:
        source: the trained weights: a file, or timm's name of pretrained weights; empty if there are none.
        loaded: names of the parameters and buffers that were loaded.
        classes: number of classes of the loaded classifier; None if it was loaded as it is, or is not known.
    """

    source: str = ""
    loaded: frozenset[str] = frozenset()
    classes: int | None = None

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
            return Origin(origin.source, loaded, origin.classes)
    return Origin()


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
