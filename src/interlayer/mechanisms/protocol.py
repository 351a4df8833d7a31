"""What a block can carry: one protocol for every mechanism.

A network's block is a function of its input. An attached block holds an ordered list of mechanisms and calls each of
them at up to three points around and inside that function:

    x      = enter(x)            before the body: another input
    y      = gate(y)             on the branch of a residual block, before the shortcut is added
    x'     = leave(x')           after the body: another output

A mechanism overrides the points it needs; the others leave everything as it is. What it wants to tell the next block is
its memory, an ordinary value that is returned and handed to the same mechanism in the next block. Nothing is stored on
a module, so a block can be run twice, checkpointed, compiled, exported and copied.

    x   the block's input, its output x': [B, C, H, W], [B, H, W, C] or tokens [B, N, C], as the network has them
    y   the branch of a residual block, [B, C, H, W]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor, nn

MemoryScope = Literal["none", "stage", "network"]


class MapLayout(Protocol):
    """How a block's output becomes a feature map [B, C, H, W] and back."""

    def to_map(self, output: Tensor, grid: tuple[int, int] | None) -> tuple[Tensor, Tensor | None]:
        """The feature map, and the prefix tokens where there are any."""

    def from_map(self, feature_map: Tensor, prefix: Tensor | None) -> Tensor:
        """The inverse of `to_map`."""


@dataclass(frozen=True)
class Place:
    """Where a mechanism's block stands: block number `index` of the `length` blocks of stage number `stage`."""

    stage: int
    index: int
    length: int

    @property
    def last(self) -> bool:
        """Whether it is the last block of its stage."""
        return self.index == self.length - 1


@dataclass(frozen=True)
class BlockValues:
    """What a block computed, before any mechanism changed it.

    Args:
        input: what the body read.
        output: what the body returned.
        shortcut: what a residual block added to its branch, for mechanisms that set `reads_shortcut` and inside
            residual blocks; None where the block adds nothing.
        projected: the branch after the 1x1 convolution of `branch_projection`, where a mechanism has one.
        layout: how outputs become feature maps, for mechanisms that set `reads_map`.
        grid: height and width of a grid of tokens; None where the output is a map itself.
    """

    input: Tensor
    output: Tensor
    shortcut: Tensor | None = None
    projected: Tensor | None = None
    layout: MapLayout | None = None
    grid: tuple[int, int] | None = None


class BlockMechanism(nn.Module):
    """Base class of what an attached block carries. See the module docstring for the points at which it is called.

    Every method is given the mechanism's memory, None where there is none yet, and the place of the block, because one
    module may be shared by all blocks of a network.

    Attributes:
        memory_scope: how far the memory is handed on: to the next block of the "stage", through the whole "network", or
            to no block at all ("none").
        reads_shortcut: whether `leave` reads the block's shortcut, projected where the block projects it.
        reads_map: whether `leave` reads the output as a feature map, so that the grid of tokens must be known.
    """

    memory_scope: MemoryScope = "stage"
    reads_shortcut: bool = False
    reads_map: ClassVar[bool] = False

    def enter(self, x: Tensor, memory: Any, place: Place) -> tuple[Tensor, Any]:
        """The input that the body reads instead of x, and the memory."""
        return x, memory

    def addition(self, x: Tensor, memory: Any, place: Place) -> Tensor | None:
        """What is added to the result of a residual block's first convolution; None for nothing."""
        return None

    def gate(self, y: Tensor, inner: list[Tensor], memory: Any, place: Place) -> tuple[Tensor, Any]:
        """The branch that is added to the shortcut instead of y, and the memory.

        Args:
            y: the branch, [B, C, H, W].
            inner: the maps inside the branch, behind each convolution but the last.
        """
        return y, memory

    def branch_projection(self, place: Place) -> Tensor | None:
        """Weights [k, C, 1, 1] of a 1x1 convolution of the branch, computed together with the end of the block."""
        return None

    def leave(self, output: Tensor, values: BlockValues, memory: Any, place: Place) -> tuple[Tensor, Any]:
        """The output that the block returns, and the memory for the next block.

        Args:
            output: the block's output, as the mechanisms before this one left it.
            values: what the body computed.
        """
        return output, memory

    def join_features(self, features: Tensor, memory: Any) -> Tensor:
        """The network's last features, with a memory that went through the whole network."""
        return features

    @classmethod
    def works_inside(cls) -> bool:
        """Whether the block must be run component by component, because a point inside it is overridden."""
        inside = ("addition", "gate", "branch_projection")
        return any(getattr(cls, name) is not getattr(BlockMechanism, name) for name in inside)

    def forward(self, x: Any, *args: Any) -> Any:
        """The identity: a container that runs all its children, as timm's feature networks do, may run this one."""
        return x
