"""The processes of a distributed run and their devices."""

from __future__ import annotations

import atexit
from functools import cache
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather, pad_across_processes, parse_flag_from_env, reduce
from torch import Tensor

from ..tasks import Collective
from .files import TrainingError
from .recipe import Recipe


class Processes(Collective):
    """The processes that train together. Every rank must call the methods that communicate.

    Args:
        device: the device of this process.
        rank: rank of this process.
        world_size: number of processes.
    """

    def __init__(self, device: torch.device, rank: int = 0, world_size: int = 1) -> None:
        self.device, self.rank, self.world_size = device, rank, world_size

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        return reduce(tensor, "sum") if self.world_size > 1 else tensor

    def gather(self, rows: Tensor) -> Tensor:
        return gather(pad_across_processes(rows, pad_index=-1)) if self.world_size > 1 else rows

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0) if self.world_size > 1 else flag

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in the order of the ranks."""
        values = [value] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Returns the value of rank 0."""
        return broadcast_object_list([value])[0] if self.world_size > 1 else value

    def wait(self) -> None:
        """Waits until every rank is here."""
        if self.world_size == 1:
            return
        if self.device.type == "cpu":  # accelerate would name a GPU by the rank, and there may be fewer GPUs
            torch.distributed.barrier()
        else:
            PartialState().wait_for_everyone()


def init_processes(recipe: Recipe) -> Processes:
    """Joins the process group that torchrun or accelerate started, if any.

    accelerate detects how the processes were started and initializes the process group. Its shared state keeps the
    device of the first run in a process, but later runs in the same process may use another device. A single process
    therefore uses the device that the recipe names.
    """
    check_device(recipe)
    cpu = recipe.device == "cpu" or not torch.cuda.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
    if recipe.precision == "float16" and cpu:
        raise TrainingError("precision=float16 needs a GPU: use bfloat16 or float32 on the CPU")
    state = PartialState(cpu=cpu)
    if state.num_processes > 1:
        _leave_group_at_exit()
        return Processes(state.device, state.process_index, state.num_processes)
    return Processes(torch.device("cpu" if cpu else "cuda"))


@cache
def _leave_group_at_exit() -> None:
    """Leave the process group when the interpreter exits, because its threads may abort the process otherwise."""

    def leave() -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    atexit.register(leave)


def check_device(recipe: Recipe) -> None:
    """Raises if the device that a recipe names does not exist."""
    if recipe.device not in (None, "cpu", "cuda"):
        raise TrainingError(
            f"device must be cpu or cuda, got {recipe.device!r}; choose among GPUs with CUDA_VISIBLE_DEVICES"
        )
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise TrainingError("device=cuda: torch sees no GPU here, use device=cpu")
