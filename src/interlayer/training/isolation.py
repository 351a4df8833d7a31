"""Isolation of runs that share a process: each has a CUDA stream and random number generators of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import torch

Item = TypeVar("Item")


def isolated(
    steps: Iterator[Item], device: torch.device, stream: torch.cuda.Stream | None, *, separate_random_state: bool
) -> Iterator[Item]:
    """Yields from ``steps``, each computed on the run's own stream.

    Args:
        stream: the CUDA stream of the run; None on a CPU.
        separate_random_state: whether to save the random state after each step and restore it before the next, so that
            random numbers drawn by the caller have no effect.
    """
    state = None
    while True:
        # The stream is entered anew for every step, because the caller uses its own stream between two steps.
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            if state is not None:
                restore_random_state(state, device)
            try:
                item = next(steps)
            except StopIteration:
                return
            if separate_random_state:
                state = random_state(device)
        yield item


def random_state(device: torch.device) -> dict[str, Any]:
    """Returns the state of every random number generator that a model may draw from."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": list(random.getstate()[1]),
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restores the state that `random_state` returned."""
    random.setstate((3, tuple(state["python"]), None))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
