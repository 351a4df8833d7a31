"""Sharding of networks over ranks (FSDP2), and full state dicts of sharded networks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from .files import TrainingError
from .processes import Processes

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def shard(network: nn.Module, processes: Processes) -> None:
    """Shards the parameters over all ranks, in place. Each block is gathered when it runs.

    Blocks are the children of the network's ``nn.Sequential`` and ``nn.ModuleList`` containers, at any depth.
    """
    if processes.world_size < 2:
        raise TrainingError("sharding=fsdp needs several processes: start with torchrun or accelerate launch")
    mesh = init_device_mesh(processes.device.type, (processes.world_size,))
    for block in _blocks(network):
        if any(p.requires_grad for p in block.parameters()):
            fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, (nn.Sequential, nn.ModuleList)):
            yield from (inner for inner in child.children() if not isinstance(inner, (nn.Sequential, nn.ModuleList)))
            yield from _blocks(child)


def full_state(network: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, Tensor], Any]:
    """Returns full state dicts, which are filled only on rank 0. Every rank must call this."""
    weights: Any = get_model_state_dict(network, options=FULL)
    return weights, get_optimizer_state_dict(network, optimizer, options=FULL) if optimizer is not None else None


def load_full_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads a full state dict into a sharded network. Every rank must call this."""
    set_model_state_dict(network, dict(weights), options=FROM_FIRST)


def load_full_state(
    network: nn.Module, optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], state: Any
) -> None:
    """Loads full state dicts into a sharded network and its optimizer. Every rank must call this."""
    load_full_weights(network, weights)
    set_optimizer_state_dict(network, optimizer, state, options=FROM_FIRST)
