"""The protocol of all mechanisms that a block can hold.

A block of a network is a function of its input, the body. An attached block holds an ordered list of mechanisms and
calls each of them at up to three points:

    x      = enter(x)            before the body; returns the new input
    y      = gate(y)             on the branch of a residual block, before the shortcut is added
    x'     = leave(x')           after the body; returns the new output

A mechanism overrides the methods it needs. The default implementations return their argument. The memory of a mechanism
is a plain value that these methods return and that is passed to the same mechanism in the next block. Nothing is stored
on a module, so a block can be run twice, checkpointed, compiled, exported and copied.

The points inside the body exist for residual blocks, which `hosts/finding/components.py` runs component by component. A
further point, such as the attention of a transformer block that reads the keys and values of earlier layers, is a
further method here and a function there that runs such a block and calls it; the memory already travels.

    x, x'   input and output of the block: [B, C, H, W], [B, H, W, C] or tokens [B, N, C], depending on the network
    y       the branch of a residual block, [B, C, H, W]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor, nn

from ..ops import BlockEnd

MemoryScope = Literal["none", "stage", "network"]


class TokenGrid(NamedTuple):
    """The grid of tokens [B, prefix + height x width, C]: the patch tokens follow the prefix tokens row by row."""

    height: int
    width: int
    prefix: int


class MapLayout(Protocol):
    """Conversion of a block's output to a feature map [B, C, H, W], or to tokens [B, P + H W, C], and back."""

    def to_map(self, output: Tensor, grid: tuple[int, int] | None) -> tuple[Tensor, Tensor | None]:
        """Returns the feature map, and the prefix tokens, or None if there are none."""

    def from_map(self, feature_map: Tensor, prefix: Tensor | None) -> Tensor:
        """The inverse of `to_map`."""

    def to_tokens(self, output: Tensor, grid: tuple[int, int] | None) -> tuple[Tensor, TokenGrid] | None:
        """Returns the tokens and their grid, or None if the output is a map [B, C, H, W]."""

    def from_tokens(self, tokens: Tensor, grid: TokenGrid) -> Tensor:
        """The inverse of `to_tokens`."""


@dataclass(frozen=True)
class Place:
    """The position of a block: the block `index` of the `length` blocks of the stage `stage`, both from 0."""

    stage: int
    index: int
    length: int

    @property
    def last(self) -> bool:
        """Whether the block is the last of its stage."""
        return self.index == self.length - 1


class BlockValues(NamedTuple):
    """The values of the body of a block.

    Args:
        input: the input of the body.
        output: the output of the body.
        shortcut: the tensor that a residual block adds to its branch. It is set if a mechanism sets `reads_shortcut` or
            works inside the block, and None if the block has no shortcut.
        projected: the branch after the 1x1 convolution of `branch_projection`, if a mechanism has one.
        layout: converts outputs to feature maps, if a mechanism sets `reads_map`.
        grid: height and width of the grid of tokens, or None if the output is a feature map.
        branch_factor: the factor of each sample's last residual branch that the block's stochastic depth drew, [B]: 0,
            or 1 / (1 - rate). It is set if a mechanism sets `reads_branch_factor`, and None if the block drew none.
        open_end: the end of a residual block, if `leave` has to compute it. `output` is then that of the last
            convolution.
    """

    input: Tensor
    output: Tensor
    shortcut: Tensor | None = None
    projected: Tensor | None = None
    layout: MapLayout | None = None
    grid: tuple[int, int] | None = None
    branch_factor: Tensor | None = None
    open_end: BlockEnd | None = None


class BlockMechanism(nn.Module):
    """Base class of mechanisms. See the module docstring for the points at which its methods are called.

    Every method receives the memory of the mechanism, which is None in the first block, and the position of the block,
    because one module may be shared by all blocks of a network.

    Attributes:
        memory_scope: "stage" passes the memory on until the end of the stage, "network" until the end of the network,
            and "none" does not pass it on.
        reads_shortcut: whether `leave` reads the shortcut of the block, after its projection if it has one.
        reads_map: whether `leave` reads the output as a feature map, which requires the grid of the tokens.
        reads_branch_factor: whether `leave` reads which samples the stochastic depth of the block dropped.
        switched_off: whether blocks leave the mechanism out. Set by `interlayer.switched_off`.
    """

    memory_scope: MemoryScope = "stage"
    reads_shortcut: bool = False
    reads_map: ClassVar[bool] = False
    reads_branch_factor: bool = False
    switched_off: bool = False

    def enter(self, x: Tensor, memory: Any, place: Place) -> tuple[Tensor, Any]:
        """Returns the input of the body and the memory."""
        return x, memory

    def addition(self, x: Tensor, memory: Any, place: Place) -> Tensor | None:
        """Returns a tensor that is added to the result of a residual block's first convolution, or None."""
        return None

    def gate(self, y: Tensor, inner: list[Tensor], memory: Any, place: Place) -> tuple[Tensor, Any]:
        """Returns the branch that is added to the shortcut, and the memory.

        Args:
            y: the branch, [B, C, H, W].
            inner: the maps inside the branch, after each convolution except the last.
        """
        return y, memory

    def branch_projection(self, place: Place) -> Tensor | None:
        """Returns the weight [k, C, 1, 1] of a 1x1 convolution of the branch, or None.

        It is computed together with the end of the block, and passed to `leave` as `values.projected`.
        """
        return None

    def ends_block(self, x: Tensor) -> bool:
        """Returns whether `leave` can compute the end of a residual block with the input x (see `open_end`).

        It is called if the block has no other mechanism.
        """
        return False

    def leave(self, output: Tensor, values: BlockValues, memory: Any, place: Place) -> tuple[Tensor, Any]:
        """Returns the output of the block and the memory for the next block.

        Args:
            output: the output of the block after the previous mechanisms of its list.
            values: the values of the body.
        """
        return output, memory

    def join_features(self, features: Tensor, memory: Any) -> Tensor:
        """Returns the last features of the network, joined with the memory of its last block."""
        return features

    @classmethod
    def works_inside(cls) -> bool:
        """Whether a method that is called inside the block is overridden, so that it is run component by component."""
        inside = ("addition", "gate", "branch_projection")
        return any(getattr(cls, name) is not getattr(BlockMechanism, name) for name in inside)

    def forward(self, x: Any, *args: Any) -> Any:
        """Returns the input. Containers that run all their children, as timm's feature networks do, may call it."""
        return x
