"""Networks shared out over processes (FSDP2): sharding, and whole state dicts of the shares."""

from __future__ import annotations

from collections.abc import Mapping
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from .files import TrainingError

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def shard(network: nn.Module, accelerator: Any) -> None:
    """Share the parameters out over all processes, block by block, in place.

    The containers of blocks are the `nn.Sequential` and `nn.ModuleList` children that hold the most parameters: a
    network's stages. Each child of theirs is gathered when it runs and let go after.
    """
    if accelerator.num_processes < 2:
        raise TrainingError("sharding=fsdp needs several processes: start with torchrun or accelerate launch")
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    policy = MixedPrecisionPolicy()
    for _, module in network.named_children():
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            for block in module.children():
                if any(p.requires_grad for p in block.parameters()):
                    fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=policy)


def full_state(network: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, Tensor], Any]:
    """Whole state dicts, on the first process; every process must call this."""
    weights: Any = get_model_state_dict(network, options=WHOLE)
    return weights, get_optimizer_state_dict(network, optimizer, options=WHOLE) if optimizer is not None else None


def load_full_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    set_model_state_dict(network, dict(weights), options=FROM_FIRST)


def load_full_state(
    network: nn.Module, optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], state: Any
) -> None:
    """Load whole state dicts into the shares; every process must call this."""
    load_full_weights(network, weights)
    set_optimizer_state_dict(network, optimizer, state, options=FROM_FIRST)
