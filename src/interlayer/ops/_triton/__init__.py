"""Fused kernels, one file an operation. They run on a GPU, or anywhere under TRITON_INTERPRET=1."""

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import asked_for

TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LOG2_E = tl.constexpr(1.4426950408889634)
SLOTS = tl.constexpr(64)  # copies of gradients that all programs add to, so that they seldom meet at one place
LEAST_CHANNELS = 32  # of a tile: Triton 3.6 reads those of 16 from a wrong address in Hopper's products


@triton.jit
def product(a, b, ACC: tl.constexpr, DOT: tl.constexpr):
    """A product of tiles whose elements are of the type DOT, added up in ACC."""
    return tl.dot(a.to(DOT), b.to(DOT), input_precision="ieee", out_dtype=ACC)


@dataclass(frozen=True)
class Launch:
    """How a kernel of attention is cut up: queries of a program at most, keys at once, warps, loads ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


# From large to small: where a GPU has too little shared memory for one, the next is taken.
LAUNCHES = (Launch(64, 64, 4, 2), Launch(64, 32, 4, 2), Launch(32, 32, 4, 1), Launch(16, 16, 4, 1))
_FITTING: dict[Hashable, int] = {}  # which launch fitted, by kernel and constants


def start_fitting(key: Hashable, launches: tuple[Launch, ...], run: Callable[[Launch], None]) -> None:
    """Run a kernel, cut up in the first way that fits the GPU; which one, is remembered for the `key`."""
    for number in range(_FITTING.get(key, 0), len(launches)):
        try:
            run(launches[number])
        except triton.OutOfResources:
            if number == len(launches) - 1:
                raise
        else:
            _FITTING[key] = number
            return


def why_not_here(x: Tensor) -> str | None:
    """Why Triton cannot run on this tensor, or None."""
    if x.device.type != "cuda" and not (
        INTERPRETED and asked_for("triton")
    ):  # the interpreter is slow: never by itself
        return f"Triton needs a GPU, got a tensor on {x.device.type}"
    if x.dtype.itemsize == 8 and not INTERPRETED:
        return "float64 is computed by the reference"
    return None


def tile(number: int, most: int | None = None) -> int:
    """The power of two that holds `number`: at least the 16 that a product of tiles takes, at most `most`."""
    size: int = max(16, triton.next_power_of_2(number))
    return size if most is None else min(size, most)
