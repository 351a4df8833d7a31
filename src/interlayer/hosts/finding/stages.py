"""The stages of a network, as `find_stages` returns them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..carried import Grid
from .calls import Call
from .layout import Layout


@dataclass
class Stage:
    """Consecutive blocks with the same output shape.

    Args:
        blocks: the calls of the blocks with the probe image.
        layout: how the outputs of the blocks are converted to feature maps.
        channels: channels of these maps.
        image_size: height and width of the probe image.
    """

    blocks: list[Call]
    layout: Layout
    channels: int
    image_size: Grid | None = None
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = [block.name for block in self.blocks]

    @property
    def resolution(self) -> Grid:
        """Height and width of the feature maps of the stage, for the probe image."""
        last = self.blocks[-1]
        carried = self.layout.embedding.grid if self.layout.embedding is not None else None
        grid = self.layout.grid_of(last.output, carried, last.positional, last.keywords)
        height, width = self.layout.to_map(last.output, grid)[0].shape[2:]
        return height, width


class StageList(list[Stage]):
    """The stages of a network. It is printed as a table."""

    def __str__(self) -> str:
        header = ("stage", "blocks", "names", "channels", "resolution", "stride")
        rows = [header, *(_row(number, stage) for number, stage in enumerate(self))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        aligned = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
        return "\n".join("  ".join(row).rstrip() for row in aligned)

    __repr__ = __str__


def _row(number: int, stage: Stage) -> tuple[str, ...]:
    height, width = stage.resolution
    names = stage.names[0] if len(stage.names) == 1 else f"{stage.names[0]} to {stage.names[-1]}"
    stride = "" if stage.image_size is None else str(round(stage.image_size[0] / height))
    return str(number), str(len(stage.blocks)), names, str(stage.channels), f"{height} x {width}", stride
