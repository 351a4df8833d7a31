"""Fused kernels, one file an operation. They run on a GPU, or anywhere under TRITON_INTERPRET=1."""

import os
from typing import Any

import torch
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


def power_of_two(number: int, *, least: int, most: int) -> int:
    """The smallest power of two that holds `number`, between two bounds."""
    size: Any = 1 << max(0, number - 1).bit_length()
    return max(least, min(most, size))
