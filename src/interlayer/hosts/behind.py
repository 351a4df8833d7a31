"""Placing layer attention behind the blocks of a network."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from timm.layers import DropPath, LayerNorm2d
from torch import nn

from ..mechanisms import LayerAttention
from ..mechanisms.description import Init, Reading
from ..mechanisms.mrla import Style
from .carry import (
    AttachedBlock,
    RecordingPatchEmbed,
    Slot,
    close_blocks,
    extend,
    open_block,
    release_from,
    restore,
)
from .layout import Grid
from .probe import AttachError, match
from .stages import Block, Stage, Stages, find_stages

SLOT = "mrla"  # the name under which a block holds its layer attention, and so the prefix of its parameters
CHANNELS_PER_HEAD = {"cnn": 32, "mbconv": 8, "transformer": 16}  # section 5.1


def place_layer_attention(
    model: nn.Module,
    *,
    make: type[LayerAttention],
    mechanism: str,
    fixed_channels_per_head: int | None = None,
    stages: Stages | None = None,
    blocks: Literal["auto", "all"] = "auto",
    channels_per_head: int | None = None,
    drop_path: float | Literal["backbone"] = 0.0,
    reading: Reading = "paper",
    init: Init = "paper",
    image_size: int | Grid | None = None,
    **options: Any,
) -> None:
    """Put layer attention of class `make` behind the blocks of `model`; see `interlayer.attach` for the options."""
    if blocks not in ("auto", "all"):
        raise ValueError(f"blocks must be 'auto' or 'all', got {blocks!r}")
    if drop_path != "backbone" and not (isinstance(drop_path, int | float) and 0 <= drop_path < 1):
        raise ValueError(f"drop_path must be a probability below 1 or 'backbone', got {drop_path!r}")
    _check_options(mechanism, make, options)
    if channels_per_head is None:
        channels_per_head = fixed_channels_per_head
    elif fixed_channels_per_head is not None and channels_per_head != fixed_channels_per_head:
        raise ValueError(
            f"{mechanism} has channels_per_head={fixed_channels_per_head}, got {channels_per_head}; "
            f"mrla_light takes any number"
        )
    if channels_per_head is not None and not isinstance(channels_per_head, int):
        raise TypeError(f"channels_per_head must be a whole number, got {channels_per_head!r}")

    norm_layer = _norm_layer_for(model)
    placed: list[tuple[Stage, list[Block], list[LayerAttention]]] = []
    for stage in find_stages(model, stages=stages, image_size=image_size):
        chosen = [block for block in stage.blocks if blocks == "all" or stages is not None or block.identity_skip]
        style: Style = "cnn" if stage.layout.kind == "NCHW" else "transformer"
        per_head = _default_channels_per_head(stage, style) if channels_per_head is None else channels_per_head
        made = [
            make(
                stage.channels,
                style=style,
                channels_per_head=per_head,
                norm_layer=norm_layer,
                drop_path=_drop_path_of(block.module) if drop_path == "backbone" else drop_path,
                reading=reading,
                init=init,
                **options,
            )
            for block in chosen
        ]
        if chosen:
            placed.append((stage, chosen, made))
    if not placed:
        raise AttachError(f"{type(model).__name__} has no block with an identity skip; blocks='all' takes every block")
    for number, (stage, chosen, made) in enumerate(placed):
        _install(model, number, stage, chosen, made)


def has_layer_attention(model: nn.Module) -> bool:
    return any(isinstance(module, AttachedBlock) and module.interlayer_slots for module in model.modules())


def take_out_layer_attention(model: nn.Module) -> None:
    """Undo `place_layer_attention`."""
    for module in list(model.modules()):
        if isinstance(module, AttachedBlock):
            for slot in module.interlayer_slots:
                delattr(module, slot.name)
        elif isinstance(module, RecordingPatchEmbed):
            del module.interlayer_grids
            restore(module)  # type: ignore[arg-type]
    close_blocks(model, "interlayer_slots", "interlayer_layout")


def _check_options(mechanism: str, make: type[LayerAttention], options: Mapping[str, Any]) -> None:
    valid = {
        name
        for cls in make.__mro__
        if issubclass(cls, LayerAttention)
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    } - {"style", "channels_per_head", "norm_layer", "drop_path", "reading", "init"}
    unknown = [name for name in options if name not in valid]
    if unknown:
        raise TypeError(f"{mechanism} has no option {unknown[0]!r}, expected one of {', '.join(sorted(valid))}")


def _default_channels_per_head(stage: Stage, style: str) -> int:
    mbconv = any(hasattr(block.module, "has_skip") for block in stage.blocks)
    wanted = CHANNELS_PER_HEAD["mbconv" if mbconv else style]
    return max(divisor for divisor in range(1, wanted + 1) if stage.channels % divisor == 0)


def _norm_layer_for(model: nn.Module) -> Callable[[int], nn.Module]:
    """BatchNorm2d, unless the network has other norms and none of that kind: then a LayerNorm over the channels."""
    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    if norms and not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in norms):
        return partial(LayerNorm2d, eps=1e-6)
    return nn.BatchNorm2d


def _drop_path_of(block: nn.Module) -> float:
    return max((float(m.drop_prob or 0.0) for m in block.modules() if isinstance(m, DropPath)), default=0.0)


def _install(
    model: nn.Module, number: int, stage: Stage, blocks: list[Block], mechanisms: list[LayerAttention]
) -> None:
    for index, (block, mechanism) in enumerate(zip(blocks, mechanisms, strict=True)):
        mechanism.layer = index
        match(mechanism, block.module)
        block.module.add_module(SLOT, mechanism)
        opened = open_block(block.module)
        opened.interlayer_slots = (Slot(SLOT, number, index, len(blocks)),)
        opened.interlayer_layout = stage.layout
    embed = stage.layout.patch_embed
    if embed is not None and not getattr(embed, "strict_img_size", True) and not isinstance(embed, RecordingPatchEmbed):
        embed.interlayer_grids = {}  # type: ignore[assignment]
        extend(embed, RecordingPatchEmbed)
    release_from(model, [block.name for block in blocks])
