"""Seeds derived from the seed of a run, so that all random numbers depend only on seed, epoch and step."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def mixed_seed(purpose: str, *numbers: int) -> int:
    """Derives a seed from a purpose and several numbers. Adjacent numbers give unrelated seeds."""
    sequence = np.random.SeedSequence([zlib.crc32(purpose.encode()), len(numbers), *numbers])
    return int(sequence.generate_state(1, np.uint64)[0]) % 2**63


def seed_libraries(seed: int) -> None:
    """Seeds the random number generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def temporary_seed(seed: int) -> Iterator[None]:
    """Seeds the three generators inside the `with` block and restores their states afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_libraries(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
