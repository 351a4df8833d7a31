"""Table 1 of the HaloNet paper: memory and FLOPs of forms of self-attention, by formula and as measured.

For a map of H x W pixels and c channels, windows of k x k, blocks of b and halos of h pixels:

    form                   neighborhoods stored       FLOPs per pixel
    global                 HW c                       4 HW c
    per pixel windows      HW k² c                    4 k² c
    SASA                   HW / b² (b + 2h)² c        4 (b + 2h)² c
    blocked local          HW / b² (b + 2h)² c        4 (b + 2h)² c

Every form is `halo_attention` with different options. Its "gathered" implementation stores neighborhoods, once for keys
and once for values. The fused kernel stores none.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from .. import ops
from ..analysis.cost import peak_bytes


@dataclass(frozen=True)
class ScalingRow:
    """Formulas and measurements of one form of self-attention. Elements are those of either keys or values."""

    way: str
    elements: int
    stored: int  # elements of the keys in the matrix product of the gathered implementation
    flops_per_pixel: int
    counted: float
    gathered_bytes: int  # peak memory of the gathered implementation without the inputs
    fused_bytes: int | None  # peak memory of the fused kernel; None if it does not run


def attention_scaling(
    *, size: int = 32, channels: int = 64, heads: int = 4, block: int = 8, halo: int = 3
) -> list[ScalingRow]:
    """Computes and measures all rows for a map of `size` x `size` pixels, with k = 2 halo + 1."""
    pixels, kernel, window = size * size, 2 * halo + 1, block + 2 * halo
    blocked = ((-(-size // block)) ** 2 * window**2 * channels, 4 * window**2 * channels)
    ways: list[tuple[str, tuple[int, int], dict[str, Any]]] = [
        ("global", (pixels * channels, 4 * pixels * channels), {"block": size, "halo": 0}),
        ("per pixel windows", (pixels * kernel**2 * channels, 4 * kernel**2 * channels), {"block": 1, "halo": halo}),
        ("SASA", blocked, {"block": block, "halo": halo, "centered": True}),
        ("blocked local", blocked, {"block": block, "halo": halo}),
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (
        torch.randn(1, channels, size, size, device=device).contiguous(memory_format=torch.channels_last)
        for _ in range(3)
    )
    rows = []
    for way, (elements, flops), options in ways:

        def attention(options: dict[str, Any] = options) -> Tensor:
            return ops.halo_attention(q, k, v, None, None, heads=heads, **options)

        with torch.no_grad():
            with ops.backend("gathered"), FlopCounterMode(display=False) as counter, _Keys() as keys:
                attention()
            with ops.backend("gathered"):
                gathered = peak_bytes(attention, device)
            fused = None
            if device == "cuda":
                with suppress(ValueError), ops.backend("triton"):  # the kernel is unsupported or missing
                    attention()
                    fused = peak_bytes(attention, device)
        counted = counter.get_total_flops() / pixels
        rows.append(ScalingRow(way, elements, keys.elements, flops, counted, gathered, fused))
    return rows


class _Keys(TorchFunctionMode):
    """Counts the elements of the keys passed to scaled_dot_product_attention."""

    elements = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.elements += args[1].numel()
        return func(*args, **(kwargs or {}))
