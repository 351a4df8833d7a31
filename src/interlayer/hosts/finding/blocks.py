"""Finds the blocks and stages of a network by running it.

A probe image is run through the model and every module call is recorded. A block is a module, other than a container,
that holds at least two convolutions or linear layers and passes a feature map to a similar sibling with the same output
shape. A stage is a chain of blocks with the same output shape in which the input of each block is the output tensor of
the previous one. The outermost such level is used: the blocks of a ConvNeXt are found inside its stages, but blocks are
not searched for further blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from ..carried import Grid
from .calls import Call, record_calls
from .layout import Layout, grids_in
from .patch_embedding import find_patch_embedding
from .probe import AttachError, probe_image
from .stages import Stage, StageList

ISOTROPIC_STAGES = 3  # a network with a single output shape is split into three stages, like DeiT in the paper (B.1.1)

Stages = Sequence[int] | Sequence[Sequence[str]]


def find_stages(model: nn.Module, *, stages: Stages | None = None, image_size: int | Grid | None = None) -> StageList:
    """Find the stages of `model` by running an image through it. The list that is returned is printed as a table.

    Args:
        model: any module that takes a batch of images.
        stages: the stages, if they are given: lengths (4, 4, 4) of successive stages of the blocks that are found, or
            module names [["layer1.0", "layer1.1"], ["layer2.0"]].
        image_size: size of the probe image, if the model does not define it.
    """
    image = probe_image(model, image_size)
    if stages is not None:
        _are_names(stages)  # raises for other values before the model runs
    return stages_in(model, record_calls(model, image), (image.shape[-2], image.shape[-1]), stages=stages)


def stages_in(model: nn.Module, calls: list[Call], size: Grid, *, stages: Stages | None = None) -> StageList:
    """Find the stages of `model`, given the calls of a forward pass.

    Args:
        model: the model.
        calls: the calls, from `record_calls`.
        size: height and width of the image.
        stages: the stages, if they are given, as for `find_stages`.
    """
    if stages is not None and _are_names(stages):
        chains = _named_chains(model, calls, stages)  # type: ignore[arg-type]
        return StageList(_describe(model, chain, size, calls) for chain in chains)
    found, reasons = StageList(), []
    for chain in _chains_of(calls):
        try:
            found.append(_describe(model, chain, size, calls))
        except AttachError as error:
            reasons.append(str(error))
    if not found:
        raise AttachError(
            f"{type(model).__name__} has no blocks to attach to: "
            + (
                reasons[0]
                if reasons
                else "no module with two or more weights passes a feature map to a similar module of the same shape; "
                "blocks that pass tuples or lists are not supported (name others with stages=[[...], ...])"
            )
        )
    chains = [stage.blocks for stage in found]
    if stages is not None:
        chains = _cut_by_length(chains, stages)  # type: ignore[arg-type]
    elif len(chains) == 1:
        chains = _cut_evenly(chains[0], ISOTROPIC_STAGES, _depth_before_pruning(model, chains[0]))
    else:
        return found
    return StageList(_describe(model, chain, size, calls) for chain in chains)


def find_chains(model: nn.Module, image_size: int | Grid | None = None) -> list[list[Call]]:
    """Returns the blocks of `model` in chains with the same output shape, for mechanisms that do not read a map."""
    return _chains_of(record_calls(model, probe_image(model, image_size)))


def _chains_of(calls: list[Call]) -> list[list[Call]]:
    return _chains(_find_blocks([c for c in calls if not c.is_container]) or _find_blocks(calls, singles=False))


def _find_blocks(calls: list[Call], singles: bool = True) -> list[Call]:
    """Returns the calls of blocks, in the order in which they run. `singles` allows stages of one block."""
    candidates = [call for call in calls if call.input is not None and _is_block_like(call.module)]
    kinds_of_candidates = [type(call.module) for call in candidates]
    candidates = [c for c in candidates if not _is_embedding(c) or kinds_of_candidates.count(type(c.module)) > 1]
    scopes: dict[str, list[Call]] = {}
    names = {call.name for call in candidates}
    for call in candidates:
        scopes.setdefault(_scope(call.name, names), []).append(call)
    repeated = {scope: [c for c in _chains(inside) if len(c) > 1] for scope, inside in scopes.items()}
    outermost = [
        chain
        for scope, chains in repeated.items()
        for chain in chains
        if not any(_inside(scope, block.name) for other in repeated.values() for c in other for block in c)
    ]
    if not outermost:  # one block per stage: modules of one class with different shapes and no candidates inside
        innermost = [c for c in candidates if not any(o is not c and _inside(o.name, c.name) for o in candidates)]
        alike = [c for c in innermost if type(c.module) is type(innermost[-1].module)]
        shapes = {tuple(c.output.shape) for c in alike}
        return alike if singles and len(alike) > 1 and len(shapes) == len(alike) else []
    kinds = {type(block.module) for chain in outermost for block in chain}
    blocks = {block.name for chain in outermost for block in chain}
    blocks |= {
        c.name
        for c in candidates
        if type(c.module) in kinds and not any(_inside(c.name, b) or _inside(b, c.name) for b in blocks)
    }
    return [call for call in candidates if call.name in blocks]


def _is_block_like(module: nn.Module) -> bool:
    weights = [p for p in module.parameters() if p.dim() > 1]
    return len(weights) >= 2 and any(True for _ in module.children())


def _is_embedding(call: Call) -> bool:
    """Whether a module reads the image of the network and holds position embeddings or other tokens."""
    tokens = [p for p in call.module.parameters(recurse=False) if p.dim() >= 3]
    return call.input is not None and call.input.dim() == 4 and (call.output.dim() == 3 or bool(tokens))


def _scope(name: str, candidates: set[str]) -> str:
    """Returns the nearest enclosing module that is a candidate, or an empty string."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in candidates:
            return name
    return ""


def _inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(outer + ".")


def _chains(blocks: list[Call]) -> list[list[Call]]:
    """Split blocks into chains in which each block takes the output of the previous one and keeps its shape."""
    chains: list[list[Call]] = []
    for block in blocks:
        previous = chains[-1][-1] if chains else None
        if previous is not None and block.input is previous.output and block.output.shape == previous.output.shape:
            chains[-1].append(block)
        else:
            chains.append([block])
    return chains


def _are_names(stages: Any) -> bool:
    """Whether `stages` are lists of names rather than lengths. Raises an error for other values."""
    if isinstance(stages, Sequence) and not isinstance(stages, str) and len(stages):
        if all(isinstance(stage, int) and not isinstance(stage, bool) for stage in stages):
            return False
        lists = [stage for stage in stages if isinstance(stage, Sequence) and not isinstance(stage, str) and len(stage)]
        names = [name for stage in lists for name in stage]
        if len(lists) == len(stages) and all(isinstance(name, str) for name in names):
            if len(set(names)) < len(names):
                raise AttachError(f"stages= names {max(names, key=names.count)!r} twice")
            return True
    raise AttachError(
        f"stages must be lengths such as (6, 6) or lists of block names such as [['layer3.0', 'layer3.1']], "
        f"got {stages!r}"
    )


def _depth_before_pruning(model: nn.Module, chain: list[Call]) -> int:
    """Returns the number of blocks before timm pruned those after the last requested feature."""
    container = chain[0].name.rpartition(".")[0].rpartition(".")[2]
    listed = [getattr(module, "feature_info", None) for module in model.modules()]
    counts = [
        sum(str(entry.get("module", "")).startswith(f"{container}.") for entry in info)
        for info in listed
        if isinstance(info, list) and all(isinstance(entry, dict) for entry in info)
    ]
    return max([len(chain), *counts])


def _cut_evenly(chain: list[Call], count: int, depth: int) -> list[list[Call]]:
    """Split `depth` blocks into `count` stages of nearly equal length, longer ones first, without pruned blocks."""
    count = min(count, depth)
    lengths, remaining = [], len(chain)
    for index in range(count):
        lengths.append(min(remaining, depth // count + (index < depth % count)))
        remaining -= lengths[-1]
    return _cut_by_length([chain], [length for length in lengths if length])


def _cut_by_length(chains: list[list[Call]], lengths: Sequence[int]) -> list[list[Call]]:
    blocks = [block for chain in chains for block in chain]
    if any(length < 1 for length in lengths) or sum(lengths) != len(blocks):
        raise AttachError(
            f"stages={tuple(lengths)} must be positive lengths that sum to the {len(blocks)} blocks found "
            f"({blocks[0].name} to {blocks[-1].name})"
        )
    cut, start = [], 0
    for length in lengths:
        cut.append(_checked_chain(blocks[start : start + length]))
        start += length
    return cut


def _named_chains(model: nn.Module, calls: list[Call], stages: Iterable[Sequence[str]]) -> list[list[Call]]:
    by_name = {call.name: call for call in calls}
    modules = dict(model.named_modules())
    for name in (name for stage in stages for name in stage):
        if name not in modules:
            raise AttachError(f"stages= names {name!r}, which is no module of {type(model).__name__}")
        if type(modules[name]) is nn.Sequential:
            raise AttachError(f"stages= names {name!r}, a plain Sequential: name the blocks inside it")
        if name not in by_name:
            raise AttachError(f"stages= names {name!r}, which must run once and return one feature map")
    return [_checked_chain([by_name[name] for name in stage]) for stage in stages]


def _checked_chain(blocks: list[Call]) -> list[Call]:
    for before, block in pairwise(blocks):
        if block.output.shape != before.output.shape:
            raise AttachError(
                f"a stage must be of one shape, but {before.name} returns {tuple(before.output.shape[1:])} "
                f"and {block.name} {tuple(block.output.shape[1:])}"
            )
        if block.input is not before.output:
            raise AttachError(f"{block.name} does not take what {before.name} returns, so they do not form a stage")
    return blocks


def _describe(model: nn.Module, chain: list[Call], image_size: Grid, calls: list[Call]) -> Stage:
    layout, shape = layout_of(model, chain[-1], image_size, calls), chain[-1].output.shape
    return Stage(chain, layout, shape[1] if layout.kind == "NCHW" else shape[-1], image_size)


def layout_of(model: nn.Module, block: Call, image_size: Grid, calls: list[Call]) -> Layout:
    """Returns the layout of the output of a module. Raises `AttachError` if it is no feature map.

    Args:
        model: the model.
        block: the call of the module.
        image_size: height and width of the image.
        calls: all calls of the forward pass.
    """
    shape = block.output.shape
    if block.output.dim() == 3:
        return _token_layout(model, block, calls)
    kind = "NCHW" if _fits(shape[2:4], image_size) else "NHWC"
    if kind == "NCHW" and _fits(shape[1:3], image_size):  # both fit: the weights determine the channels
        widths = {size for p in block.module.parameters() for size in p.shape}
        kind = "NHWC" if shape[1] not in widths and shape[3] in widths else "NCHW"
    if kind == "NHWC" and not _fits(shape[1:3], image_size):
        raise AttachError(
            f"{block.name} returns {tuple(shape[1:])}, which does not match the aspect ratio of the image {image_size}"
        )
    return Layout(kind)  # type: ignore[arg-type]


def _fits(grid: Sequence[int], image_size: Grid) -> bool:
    """Whether `grid` can be the image at a lower resolution, reduced equally in both directions up to rounding."""
    (height, width), (image_height, image_width) = grid, image_size
    reductions = range(1, max(image_size) + 1)
    return any(
        abs(height - image_height / reduction) < 1 and abs(width - image_width / reduction) < 1
        for reduction in reductions
    )


def _first_input(calls: list[Call], block: Call) -> Any:
    """Returns the input of the first block of the chain of similar blocks that ends with `block`."""
    alike = {id(call.output): call for call in calls if type(call.module) is type(block.module)}
    while block.input is not None and id(block.input) in alike and alike[id(block.input)] is not block:
        block = alike[id(block.input)]
    return block.input


def _token_layout(model: nn.Module, block: Call, calls: list[Call]) -> Layout:
    tokens = block.output.shape[1]
    known = getattr(model, "num_prefix_tokens", None)
    for prefix in [known] if isinstance(known, int) else range(0, min(tokens, 8)):
        if next(grids_in(block.arguments, tokens - prefix), None) is not None:
            return Layout("tokens", prefix)
    for module in model.modules():
        grid = getattr(module, "grid_size", None)
        if isinstance(grid, (tuple, list)) and len(grid) == 2 and hasattr(module, "dynamic_feat_size"):
            prefix = tokens - grid[0] * grid[1]
            if prefix == known or (known is None and 0 <= prefix < 8):
                return Layout("tokens", prefix, module)
    embedding = find_patch_embedding(calls, _first_input(calls, block))
    if embedding is not None and tokens == embedding.prefix + embedding.grid[0] * embedding.grid[1]:
        return Layout("tokens", embedding.prefix, embedding=embedding)
    raise AttachError(
        f"{block.name} returns {tokens} tokens and nothing tells their grid: neither the block's arguments nor a patch "
        f"embedding of that many patches"
    )
