"""Weights that a network starts from."""

from __future__ import annotations

from typing import Any

from torch import nn

from .. import hosts
from ..mechanisms import fit_halo_tables
from .checkpoints import CheckpointError, check_description, read_checkpoint, unwrap


def start_from(network: nn.Module, path: str) -> None:
    """Loads weights from a file; those of a classifier of another number of classes are left as they are.

    A file of a plain backbone also starts a network that something is attached to. Relative positions of local
    attention are interpolated for another block and halo (HaloNet, appendix E).
    """
    state_dict, descriptions = read_checkpoint(path)
    tensors, descriptions = fit_halo_tables(network, unwrap(state_dict), descriptions)
    check_description(descriptions, network)
    tensors = hosts.as_wide_as(network, tensors)
    own = network.state_dict()
    head = {id(p) for p in _classifier(network).parameters()}
    head_names = {name for name, p in network.named_parameters() if id(p) in head}
    replaced = hosts.names_of_replaced(network, tensors)
    fitting = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in replaced and not (name in head_names and name in own and own[name].shape != tensor.shape)
    }
    unknown = [name for name in fitting if name not in own]
    attached = {f"{name}." for name in hosts.attached_mechanisms(network)}
    missing = [
        name
        for name in own
        if name not in fitting and name not in head_names and not any(name.startswith(prefix) for prefix in attached)
    ]
    wrong = [name for name in fitting if name in own and own[name].shape != fitting[name].shape]
    for what, names in (("unknown", unknown), ("missing", missing), ("of another shape", wrong)):
        if names:
            raise CheckpointError(f"{path} does not fit the network; {what}: {', '.join(names[:5])}")
    network.load_state_dict(fitting, strict=False)
    if replaced:
        hosts.hand_to_replaced(network, tensors)


def _classifier(network: Any) -> nn.Module:
    return network.get_classifier()
