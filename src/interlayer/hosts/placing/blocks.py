"""Putting a mechanism into every block of a stage: what all kinds that follow `BlockMechanism` share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ...mechanisms.protocol import BlockMechanism, Place
from ..block import AttachedBlock, add_entry
from ..carried import GridPassing, Passing, release_from
from ..extending import extend, restore
from ..finding.calls import Call
from ..finding.layout import Layout
from ..finding.probe import match
from ..finding.stages import Stage, find_chains


def place_in_stage(
    model: nn.Module, key: str, number: int, stage: Stage, mechanisms: Sequence[BlockMechanism], blocks: Any = None
) -> None:
    """Give each block of a stage one mechanism, in the block's device, dtype and mode.

    Args:
        model: the network.
        key: the name of the mechanisms' memory, and of their submodules in the blocks.
        number: of the stage.
        stage: as `find_stages` found it.
        mechanisms: one for each block.
        blocks: the stage's blocks that are given one, where not all are.
    """
    blocks = stage.blocks if blocks is None else blocks
    for index, (block, mechanism) in enumerate(zip(blocks, mechanisms, strict=True)):
        match(mechanism, block.module)
        add_entry(block.module, key, mechanism, Place(number, index, len(blocks)), layout=stage.layout)
    release_from(model, [block.name for block in blocks])


def place_shared(model: nn.Module, key: str, mechanism: BlockMechanism, stages: Sequence[Sequence[Call]]) -> None:
    """Give all blocks of a network one mechanism together, which the network holds under its key."""
    match(mechanism, model)
    model.add_module(key, mechanism)
    for number, stage in enumerate(stages):
        for index, block in enumerate(stage):
            add_entry(block.module, key, mechanism, Place(number, index, len(stage)), shared=True)
    release_from(model, [block.name for stage in stages for block in stage])


def let_grid_travel(model: nn.Module, layouts: Sequence[Layout], image_size: Any) -> None:
    """In a vision transformer for images of any size, send the grid of the tokens along with them.

    The grid then reaches a block as part of its input: two images of as many patches but other grids can be in flight
    together, each block recomputed for its own.
    """
    embeds = [layout.patch_embed for layout in layouts if layout.patch_embed is not None]
    flexible = next((embed for embed in embeds if not getattr(embed, "strict_img_size", True)), None)
    owner: Any = next((m for m in model.modules() if getattr(m, "patch_embed", None) is flexible), None)
    if flexible is None or not hasattr(owner, "_pos_embed"):
        return
    extend(owner, GridPassing)
    for name in ("norm_pre", "patch_drop"):  # between the position embedding and the first block
        between = getattr(owner, name, None)
        if isinstance(between, nn.Module) and not isinstance(between, nn.Identity):
            extend(between, Passing)
    chain = [block.module for blocks in find_chains(model, image_size) for block in blocks]
    attached = [index for index, block in enumerate(chain) if isinstance(block, AttachedBlock)]
    for block in chain[: attached[-1]]:  # the last one returns a plain tensor
        if isinstance(block, AttachedBlock):
            block.interlayer_hands_on_grid = True
        else:
            extend(block, Passing)


def stop_grid(model: nn.Module) -> None:
    """Undo `let_grid_travel`."""
    for module in list(model.modules()):
        for mixin in (GridPassing, Passing):
            if isinstance(module, mixin):
                restore(module, mixin)
