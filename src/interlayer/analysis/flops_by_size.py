"""FLOPs as a function of the size of the image, and the FLOPs that a mechanism adds (MRLA, Figure 5).

Sums and products of elements are not counted. MRLA-base therefore adds as many as MRLA-light, although its weighted sum
of all earlier layers takes longer: see `depth.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from ..models.build import ModelError, build_network, check_network, plain_name
from .cost import count_flops_both_ways
from .fits import Line, linear_fit
from .shapes import Memory, RememberedShapes


@dataclass(frozen=True)
class FlopsBySize:
    """Multiply-adds of a network for square images of several sizes.

    Args:
        name: name of the network.
        sizes: the sizes of the images, in pixels.
        flops: the multiply-adds at each size.
        backbone: name of its plain backbone; its own name if it is one.
        plain: the multiply-adds of its plain backbone at each size; None for a plain backbone.
        refused: the reason why other sizes cannot be used, by size.
    """

    name: str
    sizes: tuple[int, ...]
    flops: tuple[int, ...]
    backbone: str
    plain: tuple[int, ...] | None = None
    refused: dict[int, str] = field(default_factory=dict)

    @property
    def added(self) -> tuple[int, ...] | None:
        """The multiply-adds that the mechanism adds at each size; None for a plain backbone."""
        if self.plain is None:
            return None
        return tuple(ours - plain for ours, plain in zip(self.flops, self.plain, strict=True))

    @property
    def line(self) -> Line | None:
        """The line through the added multiply-adds by the number of pixels; None without two sizes."""
        if self.added is None or len(self.sizes) < 2:
            return None
        return linear_fit([size**2 for size in self.sizes], self.added)


def flops_by_size(
    names: Sequence[str],
    sizes: Sequence[int],
    *,
    convention: Literal["paper", "torch"] = "torch",
    progress: Callable[[str], None] = lambda what: None,
) -> list[FlopsBySize]:
    """Counts the multiply-adds of networks and of their plain backbones for images of several sizes.

    Networks are built for each size on the meta device, so that nothing is computed. A size that a network or its plain
    backbone does not accept is left out.

    Args:
        names: names of networks: NAME, or NAME+MECHANISM:OPTION=VALUE.
        sizes: sizes of square images, in pixels.
        convention: how multiply-adds are counted; see `count_flops`.
        progress: called before each count with what is counted. There is one count for each size of each network and
            each plain backbone.

    Raises:
        ValueError: a name is not known, or there is no size that a network accepts.
    """
    sizes = sorted(dict.fromkeys(sizes))
    if not sizes or sizes[0] < 1:
        raise ValueError(f"expected sizes of images such as 128,224,384, got {', '.join(map(str, sizes)) or 'none'}")
    for name in names:
        check_network(name)
    building: Memory = {}
    counting: Memory = {}
    counted: dict[tuple[str, int], int | str] = {}

    def count(name: str, size: int) -> int | str:
        """Returns the multiply-adds, or the reason why the network does not accept images of this size."""
        if (name, size) not in counted:
            progress(f"{name}, {size} pixels")
            try:
                with torch.device("meta"), RememberedShapes(building):
                    network: nn.Module = build_network(name, image_size=size)
                paper, by_torch = count_flops_both_ways(network, size, counting)
                counted[name, size] = by_torch if convention == "torch" else paper
            except (ModelError, RuntimeError, AssertionError, ValueError, TypeError) as error:
                counted[name, size] = " ".join(str(error).split()) or type(error).__name__
        return counted[name, size]

    result = []
    for name in names:
        plain = plain_name(name)
        found, refused = [], {}
        for size in sizes:
            pair = count(plain, size), count(name, size)
            reason = next((value for value in pair if isinstance(value, str)), None)
            if reason is None:
                found.append((size, *pair))
            else:
                refused[size] = reason
        if not found:
            raise ValueError(f"{name} takes images of none of the sizes {', '.join(map(str, sizes))}: {reason}")
        accepted, plain_flops, flops = zip(*found, strict=True)
        result.append(FlopsBySize(name, accepted, flops, plain, plain_flops if plain != name else None, refused))
    return result
