"""Loading weights into a network.

`match_tensors` compares tensors with those of a network. Every function that loads weights uses it, so that missing,
unexpected and mismatched tensors are reported in the same way:

    ====================  =========================================================================================
    `load_weights`        loads a file of the same model, strictly
    `start_from`          loads initial weights; mechanisms may be missing, and the classifier may have another size
    `load_backbone`       loads the state dict of a plain backbone into a network with mechanisms
    `convert_checkpoint`  converts a checkpoint of the authors' programs (`interlayer.models.published`)
    ====================  =========================================================================================
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from .. import hosts
from ..mechanisms import fit_halo_tables, fit_uniform_heads, fitted_flags, fitted_gates
from .checkpoints import CheckpointError, check_description, named_tensors, read_checkpoint, unwrap
from .origin import Origin, taken_over
from .positions import fit_positions


@dataclass(frozen=True)
class LoadReport:
    """Result of matching tensors with a network by name and shape.

    Attributes:
        placed: names of the tensors that match.
        missing: names of tensors of the network that were not given.
        unexpected: names of given tensors that the network does not have.
        mismatched: names of tensors with different shapes, with both shapes.
        origin: which tensors of the network were loaded, once they are.
    """

    placed: list[str]
    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]
    origin: Origin = field(default_factory=Origin)

    @property
    def complete(self) -> bool:
        """Whether no tensor is missing, unexpected or mismatched."""
        return not (self.missing or self.unexpected or self.mismatched)

    def check(self, what: str, remark: str = "") -> None:
        """Raises a `CheckpointError` that begins with `what` and ends with `remark` unless the report is complete."""
        if not self.complete:
            raise CheckpointError(f"{what}: {self}{remark}")

    def __str__(self) -> str:
        lists = [("missing", self.missing), ("unexpected", self.unexpected), ("of another shape", self.mismatched)]
        return "; ".join(f"{len(names)} {what}: {first_names(names)}" for what, names in lists if names) or "all placed"


def match_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, optional: Collection[str] = ()
) -> LoadReport:
    """Compares tensors with those that a network expects.

    Args:
        tensors: the given tensors, by name.
        expected: the tensors of the network, by name.
        optional: names of tensors of the network that may be missing.
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


def check_fit(model: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Raises a `CheckpointError` that begins with `what` unless `tensors` are exactly those of `model`."""
    report = match_tensors(tensors, model.state_dict())
    report.check(what, _other_blocks(report))


def _other_blocks(report: LoadReport) -> str:
    """Returns a remark about gates that a checkpoint has in more blocks than the network."""
    kinds = {found[1] for name in report.unexpected if (found := re.search(r"\.(\w+)_gate\.", name))}
    for kind in sorted(kinds):
        if any(f".{kind}_gate." in name for name in report.placed):
            return f"; it has {kind} in other blocks: set the option blocks, {kind}:blocks=all for earlier files"
    return ""


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Loads weights saved by `save_weights`, or any state dict of this model, strictly.

    If the file was saved with another reading, mechanism or number of channels per head, an error is raised and nothing
    is loaded, because tensors of equal names and shapes can compute different functions.
    """
    state_dict, descriptions = read_checkpoint(path)
    check_description(descriptions, model)
    tensors = fit_uniform_heads(model, unwrap(state_dict), descriptions)
    with fitted_flags(model, tensors), fitted_gates(model, tensors):
        check_fit(model, tensors, "the checkpoint does not fit the model")
    model.load_state_dict(tensors)


def load_backbone(model: nn.Module, state_dict: Mapping[str, Tensor], *, strict: bool = True) -> LoadReport:
    """Loads the weights of a plain backbone into a model with attached mechanisms, which keep their own parameters.

    Position embeddings of another image size are interpolated, as timm does.

    Args:
        model: a model with attached mechanisms.
        state_dict: the state dict of the same backbone without mechanisms.
        strict: whether to raise an error, without loading anything, unless all names and shapes match.

    Returns:
        The names of tensors that were loaded, missing, unexpected or mismatched.
    """
    given = named_tensors(state_dict)
    tensors = hosts.as_wide_as(model, fit_positions(model, given))
    own = _without(tensors, hosts.names_of_replaced(model, tensors))
    with fitted_flags(model, given):
        expected = _without(model.state_dict(), _attached_names(model))
        report = match_tensors(own, expected)
        if strict:
            report.check("these are not the weights of this backbone, nothing was loaded")
    model.load_state_dict({name: own[name] for name in report.placed}, strict=False)
    report.placed.extend(hosts.hand_to_replaced(model, tensors))
    return report


def start_from(network: nn.Module, path: str | os.PathLike[str]) -> LoadReport:
    """Loads the initial weights of a network from a file.

    The file may contain the weights of a plain backbone: attached mechanisms that are missing keep their own
    initialization, and so do a classifier with a different number of classes and the layers that only detectors have.
    Position embeddings of another image size are interpolated, as timm does, and so are relative positions of local
    attention with another block and halo (HaloNet, appendix E).
    """
    state_dict, descriptions = read_checkpoint(path)
    tensors, descriptions = fit_halo_tables(network, unwrap(state_dict), descriptions)
    check_description(descriptions, network)
    narrow = fit_positions(network, fit_uniform_heads(network, tensors, descriptions))
    tensors = hosts.as_wide_as(network, narrow)
    with fitted_flags(network, tensors), fitted_gates(network, tensors):
        expected = network.state_dict()
        head = classifier_names(network)
        other_head = {name for name in head & tensors.keys() if tensors[name].shape != expected[name].shape}
        own = _without(tensors, other_head.union(hosts.names_of_replaced(network, tensors)))
        report = match_tensors(own, expected, optional=head | _attached_names(network) | _added_names(network))
        report.check(f"{path} does not fit the network", _other_blocks(report))
    network.load_state_dict(own, strict=False)
    report.placed.extend(hosts.hand_to_replaced(network, tensors))
    widened = {name for name in own if own[name].shape != narrow[name].shape}  # some of its columns are new
    loaded = (set(own) - widened) | taken_over(network, report.placed)
    classes = next((len(tensors[name]) for name in sorted(other_head)), None)
    return replace(report, origin=Origin(str(path), frozenset(loaded), classes, frozenset(descriptions)))


def classifier_names(network: nn.Module) -> set[str]:
    """Returns the names of the parameters of the classifier of a timm model, or of all its classifiers."""
    classifier = {id(parameter) for parameter in classifier_parameters(network)}
    return {name for name, parameter in network.named_parameters() if id(parameter) in classifier}


def classifier_parameters(network: Any) -> list[nn.Parameter]:
    """Returns the parameters of the classifier of a timm model, or of all its classifiers."""
    classifier = network.get_classifier()
    heads = classifier if isinstance(classifier, (tuple, list)) else [classifier]
    return [parameter for head in heads for parameter in head.parameters()]


def _attached_names(model: nn.Module) -> set[str]:
    """Returns the names of all tensors of attached mechanisms."""
    prefixes = tuple(f"{name}." for name in hosts.attached_mechanisms(model))
    return {name for name in model.state_dict() if name.startswith(prefixes)}


def _added_names(model: nn.Module) -> set[str]:
    """Returns the names of all tensors of layers that only detectors have, which the network names itself."""
    prefixes = tuple(f"{name}." for name in getattr(model, "detection_layers", ()))
    return {name for name in model.state_dict() if name.startswith(prefixes)} if prefixes else set()


def _without(tensors: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def first_names(names: Sequence[str], most: int = 10) -> str:
    """Lists the first names, and the number of those that are not listed."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
