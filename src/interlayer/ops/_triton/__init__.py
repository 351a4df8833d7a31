"""Fused kernels, one file an operation. They run on a GPU, or anywhere under TRITON_INTERPRET=1."""

import os

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
