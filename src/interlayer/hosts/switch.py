"""Switches attached mechanisms off for a while, without copying or changing the network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from ..mechanisms import UniformHeadAttention
from ..mechanisms.protocol import BlockMechanism
from .attach import MECHANISMS, attached_mechanisms


@contextmanager
def switched_off(model: nn.Module, mechanisms: str | Sequence[str] | None = None) -> Iterator[None]:
    """Run `model` without its mechanisms inside the `with` block.

    The network computes what it computes after `detach`, with the same parameters, and its outputs keep their shapes:
    where a classifier also reads the state of recurrent layer aggregation, the state is zero. Everything else, such as
    the mode of the network, stays as it is, and the mechanisms are back when the block is left, also by an error. In a
    copy of the network that is made inside the block, they stay switched off.

    Layers that replaced others ("halo", and the uniform heads of "cb") stay: the network was trained without the layers
    that they replaced, so it has no form without them.

    Args:
        model: a network with mechanisms.
        mechanisms: the names of the mechanisms to switch off, as `attach` takes them. Default: all mechanisms.

    Raises:
        ValueError: the network has no such mechanism, or none that can be switched off.

    >>> with torch.no_grad(), interlayer.switched_off(model):
    ...     plain = model(images)
    """
    found = some_switchable(model)
    chosen = set(found.values()) if mechanisms is None else _chosen(model, found, mechanisms)
    with modules_off(module for module, name in found.items() if name in chosen):
        yield


@contextmanager
def modules_off(modules: Iterable[BlockMechanism]) -> Iterator[None]:
    """Switch these mechanisms off inside the `with` block."""
    changed = [module for module in modules if not module.switched_off]
    for module in changed:
        module.switched_off = True
    try:
        yield
    finally:
        for module in changed:
            del module.switched_off  # the default of the class


def switchable_mechanisms(model: nn.Module) -> dict[BlockMechanism, str]:
    """Returns every attached mechanism that can be switched off, with the name that `attach` takes."""
    attached = attached_mechanisms(model).items()
    return {module: mechanism_name(path, module) for path, module in attached if isinstance(module, BlockMechanism)}


def some_switchable(model: nn.Module) -> dict[BlockMechanism, str]:
    """Returns `switchable_mechanisms`. Raises a ValueError with the reason if there is none."""
    found = switchable_mechanisms(model)
    if found:
        return found
    name, attached = type(model).__name__, attached_mechanisms(model)
    if attached:
        replaced = (
            "self-attention" if isinstance(next(iter(attached.values())), UniformHeadAttention) else "convolutions"
        )
        raise ValueError(
            f"the mechanism of {name} replaces its {replaced} and cannot be switched off: the network was trained "
            f"without the layers that it replaced"
        )
    raise ValueError(
        f"{name} has no mechanism that can be switched off: nothing is attached to it (see interlayer.attach), and a "
        f"network whose own layers are the mechanism, such as HaloNet or ResT, has no form without it"
    )


def mechanism_name(path: str, mechanism: nn.Module) -> str:
    """Returns the name of an attached mechanism, as `attach` takes it, from its path in the network."""
    for name, row in MECHANISMS.items():
        if getattr(row.place, "keywords", {}).get("make") is type(mechanism):
            return name
    return path.rpartition(".")[2].removesuffix("_gate")


def _chosen(model: nn.Module, found: dict[BlockMechanism, str], mechanisms: str | Sequence[str]) -> set[str]:
    chosen = {mechanisms} if isinstance(mechanisms, str) else set(mechanisms)
    unknown = sorted(chosen - set(found.values()))
    if unknown:
        has = ", ".join(sorted(set(found.values())))
        raise ValueError(f"{type(model).__name__} has no mechanism {unknown[0]!r} to switch off: it has {has}")
    return chosen
