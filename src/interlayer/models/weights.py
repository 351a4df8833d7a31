"""Loading weights into a network.

`match_tensors` compares the tensors at hand with those of a network. Every function that loads weights uses it, so that
missing, unexpected and mismatched tensors read the same in every message:

    ====================  =========================================================================================
    `load_weights`        a file of this very model; every tensor must be there
    `start_from`          a file that starts a network: mechanisms and a classifier of other size may be missing
    `load_backbone`       a plain backbone's state dict into a network with mechanisms
    `convert_checkpoint`  a checkpoint of the authors' programs (`interlayer.models.published`); loads nothing
    ====================  =========================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .. import hosts
from ..mechanisms import fit_halo_tables
from .checkpoints import CheckpointError, check_description, named_tensors, read_checkpoint, unwrap
from .positions import fit_positions


@dataclass(frozen=True)
class LoadReport:
    """Which tensors have their place in a network.

    Attributes:
        placed: names of the tensors that fit.
        missing: names of the network that the tensors lack.
        unexpected: names of the tensors that the network lacks.
        mismatched: names whose shapes differ, with both shapes.
    """

    placed: list[str]
    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]

    @property
    def complete(self) -> bool:
        """Whether nothing is missing, unexpected or mismatched."""
        return not (self.missing or self.unexpected or self.mismatched)

    def check(self, what: str, remark: str = "") -> None:
        """Raises a `CheckpointError` that begins with `what` and ends with `remark` unless the report is complete."""
        if not self.complete:
            raise CheckpointError(f"{what}: {self}{remark}")

    def __str__(self) -> str:
        lists = [("missing", self.missing), ("unexpected", self.unexpected), ("of another shape", self.mismatched)]
        return "; ".join(f"{len(names)} {what}: {_first(names)}" for what, names in lists if names) or "all placed"


def match_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, optional: Collection[str] = ()
) -> LoadReport:
    """Compares tensors with those that a network expects.

    Args:
        tensors: the tensors at hand, by name.
        expected: the tensors of the network, by name.
        optional: names of the network that may be missing.
    """
    shared = [name for name in tensors if name in expected]
    return LoadReport(
        placed=[name for name in shared if tensors[name].shape == expected[name].shape],
        missing=[name for name in expected if name not in tensors and name not in optional],
        unexpected=[name for name in tensors if name not in expected],
        mismatched=[
            f"{name} {tuple(tensors[name].shape)}, expected {tuple(expected[name].shape)}"
            for name in shared
            if tensors[name].shape != expected[name].shape
        ],
    )


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Loads weights saved by `save_weights`, or any state dict of this model, strictly.

    A file that was saved with another reading, mechanism or number of channels per head is refused and nothing is
    loaded, because such files can hold equal tensors that mean different functions.
    """
    state_dict, descriptions = read_checkpoint(path)
    check_description(descriptions, model)
    tensors = unwrap(state_dict)
    match_tensors(tensors, model.state_dict()).check("the checkpoint does not fit the model")
    model.load_state_dict(tensors)


def load_backbone(model: nn.Module, state_dict: Mapping[str, Tensor], *, strict: bool = True) -> LoadReport:
    """Loads a plain backbone's weights into a model with attached mechanisms, whose own parameters stay as they are.

    Position embeddings of another image size are interpolated, as timm does.

    Args:
        model: a model with attached mechanisms.
        state_dict: the weights of the same backbone without them.
        strict: whether to raise, with nothing loaded, unless every entry has its place and the other way round.

    Returns:
        What was placed, and the names of what could not be.
    """
    expected = _without(model.state_dict(), _attached_names(model))
    tensors = hosts.as_wide_as(model, fit_positions(model, named_tensors(state_dict)))
    own = _without(tensors, hosts.names_of_replaced(model, tensors))
    report = match_tensors(own, expected)
    if strict:
        report.check("these are not the weights of this backbone, nothing was loaded")
    model.load_state_dict({name: own[name] for name in report.placed}, strict=False)
    report.placed.extend(hosts.hand_to_replaced(model, tensors))
    return report


def start_from(network: nn.Module, path: str | os.PathLike[str]) -> LoadReport:
    """Loads the weights in a file that a network starts from.

    The file may be that of a plain backbone: attached mechanisms that it lacks keep their own initialization. A
    classifier of another number of classes keeps its own as well. Position embeddings of another image size are
    interpolated, as timm does, and so are relative positions of local attention of another block and halo (HaloNet,
    appendix E).
    """
    state_dict, descriptions = read_checkpoint(path)
    tensors, descriptions = fit_halo_tables(network, unwrap(state_dict), descriptions)
    check_description(descriptions, network)
    tensors = hosts.as_wide_as(network, fit_positions(network, tensors))
    expected = network.state_dict()
    classifier = {id(parameter) for parameter in classifier_parameters(network)}
    head = {name for name, parameter in network.named_parameters() if id(parameter) in classifier}
    other_head = {name for name in head & tensors.keys() if tensors[name].shape != expected[name].shape}
    own = _without(tensors, other_head.union(hosts.names_of_replaced(network, tensors)))
    report = match_tensors(own, expected, optional=head | _attached_names(network))
    report.check(f"{path} does not fit the network")
    network.load_state_dict(own, strict=False)
    report.placed.extend(hosts.hand_to_replaced(network, tensors))
    return report


def classifier_parameters(network: Any) -> list[nn.Parameter]:
    """Returns the parameters of a timm model's classifier, or of all its classifiers."""
    classifier = network.get_classifier()
    heads = classifier if isinstance(classifier, (tuple, list)) else [classifier]
    return [parameter for head in heads for parameter in head.parameters()]


def _attached_names(model: nn.Module) -> set[str]:
    """Returns the names of all tensors of attached mechanisms."""
    prefixes = tuple(f"{name}." for name in hosts.attached_mechanisms(model))
    return {name for name in model.state_dict() if name.startswith(prefixes)}


def _without(tensors: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def _first(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
