"""Adds mechanisms to the blocks of a network, for all kinds that implement `BlockMechanism`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ...mechanisms.protocol import BlockMechanism, Place
from ..block import AttachedBlock, add_entry, hold
from ..carried import GridEmbedding, GridPassing, Passing, release_from
from ..extending import extend, restore
from ..finding.blocks import find_chains
from ..finding.calls import Call
from ..finding.layout import Layout
from ..finding.probe import AttachError, match
from ..finding.stages import Stage

GRID_MIXINS = (GridPassing, GridEmbedding, Passing)


def are_block_numbers(value: Any) -> bool:
    """Whether `value` is a list of numbers of blocks, counted from 0 through all stages, as in timm's `out_indices`."""
    listed = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return listed and all(type(number) is int and number >= 0 for number in value)


def check_block_numbers(option: str, numbers: Sequence[int], count: int, name: str) -> None:
    """Raise an error if the network `name`, which has `count` blocks, does not have all blocks that an option names."""
    if max(numbers) >= count:
        raise AttachError(f"{name} has the blocks 0 to {count - 1}, got {option}={list(numbers)}")


def place_in_stage(
    model: nn.Module, key: str, number: int, stage: Stage, mechanisms: Sequence[BlockMechanism], blocks: Any = None
) -> None:
    """Add one mechanism to each block of a stage, with the device, dtype and mode of the block.

    Args:
        model: the network.
        key: the name of the mechanisms' memory, and of their submodules in the blocks.
        number: the index of the stage.
        stage: a stage that `find_stages` returned.
        mechanisms: one mechanism for each block.
        blocks: the blocks that are given a mechanism. Default: all blocks of the stage.
    """
    blocks = stage.blocks if blocks is None else blocks
    for index, (block, mechanism) in enumerate(zip(blocks, mechanisms, strict=True)):
        match(mechanism, block.module)
        add_entry(block.module, key, mechanism, Place(number, index, len(blocks)), layout=stage.layout)
    release_from(model, [block.name for block in blocks])


def place_shared(model: nn.Module, key: str, mechanism: BlockMechanism, stages: Sequence[Sequence[Call]]) -> None:
    """Add one mechanism to all blocks of a network, which holds it as the submodule `key`."""
    match(mechanism, model)
    hold(model, key, mechanism)
    for number, stage in enumerate(stages):
        for index, block in enumerate(stage):
            add_entry(block.module, key, mechanism, Place(number, index, len(stage)), shared=True)
    release_from(model, [block.name for stage in stages for block in stage])


def let_grid_travel(model: nn.Module, image_size: Any) -> None:
    """Pass the grid of the tokens from block to block, in a vision transformer for images of any size.

    The grid is part of the input of a block. Two images with the same number of patches but different grids can be in
    flight at the same time, and a block that is recomputed reads the grid of its own input.
    """
    readers = map_readers(model)
    layouts = [block.interlayer_layout for block in readers.values() if block.interlayer_layout is not None]
    before = _grid_sources(model, layouts)
    if not before:
        return
    chain = [block.module for blocks in find_chains(model, image_size) for block in blocks]
    inner = [name for name, module in readers.items() if module not in chain]
    if inner:
        raise AttachError(
            f"{inner[0]} is not a block of the network but inside one, where the grid of an image of any size does not "
            f"reach it: name blocks, or build the network without dynamic_img_size"
        )
    last = max(index for index, block in enumerate(chain) if block in readers.values())
    carry_grid(before | dict.fromkeys(chain[:last], Passing))


def _grid_sources(model: nn.Module, layouts: Sequence[Layout]) -> dict[nn.Module, type]:
    """Returns the modules before the first block that pass the grid on, with their mixins. Empty if it need not be."""
    embedding = next((layout.embedding for layout in layouts if layout.embedding is not None), None)
    if embedding is not None:
        return {embedding.module: GridEmbedding} | dict.fromkeys(embedding.passing, Passing)
    embeds = [layout.patch_embed for layout in layouts if layout.patch_embed is not None]
    flexible = next((embed for embed in embeds if not getattr(embed, "strict_img_size", True)), None)
    owner: Any = next((m for m in model.modules() if getattr(m, "patch_embed", None) is flexible), None)
    if flexible is None or not hasattr(owner, "_pos_embed"):
        return {}
    before: list[Any] = [getattr(owner, name, None) for name in ("norm_pre", "patch_drop")]  # the first block
    before = [module for module in before if isinstance(module, nn.Module) and not isinstance(module, nn.Identity)]
    return {owner: GridPassing} | dict.fromkeys(before, Passing)


def map_readers(model: nn.Module) -> dict[str, Any]:
    """Returns the blocks with a mechanism that reads a feature map, by name."""
    blocks = ((name, module) for name, module in model.named_modules() if isinstance(module, AttachedBlock))
    return {
        name: block
        for name, block in blocks
        if any(entry.mechanism_in(block).reads_map for entry in block.interlayer_entries)
    }


def grid_carriers(model: nn.Module) -> dict[nn.Module, type]:
    """Returns the modules that pass the grid of the tokens on, with the mixin by which a module does so."""
    found: dict[nn.Module, type] = {}
    for module in model.modules():
        for mixin in GRID_MIXINS:
            if isinstance(module, mixin) or (mixin is Passing and getattr(module, "interlayer_passes_grid", False)):
                found[module] = mixin
    return found


def carry_grid(modules: Mapping[nn.Module, type]) -> None:
    """Make these modules pass the grid of the tokens on."""
    for module, mixin in modules.items():
        if isinstance(module, AttachedBlock):
            restore(module, Passing)  # type: ignore[arg-type]
            module.interlayer_passes_grid = True
        else:
            extend(module, mixin)


def stop_grid(model: nn.Module) -> None:
    """Undo `carry_grid` for all modules of a network."""
    for module in grid_carriers(model):
        module.__dict__.pop("interlayer_passes_grid", None)
        for mixin in GRID_MIXINS:
            restore(module, mixin)
