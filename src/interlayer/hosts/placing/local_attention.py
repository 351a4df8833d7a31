"""Replaces the spatial convolutions of a network by local attention."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...mechanisms.halo import Downsampling, HaloAttention2d, Position
from ...mechanisms.options import expect_flag, expect_whole, one_of, option
from ..carried import Grid
from ..finding.calls import record_calls
from ..finding.probe import AttachError, match, probe_image
from .replaced import put_back, replace, replaced_layers


@dataclass(frozen=True, kw_only=True)
class LocalAttentionOptions:
    """Options of blocked local attention."""

    stages: Sequence[int] | None = option(
        None, "numbers, from 1, of the stages in which 3x3 convolutions are replaced, such as (3, 4)", shown="all"
    )
    last: int | None = option(
        None,
        "number of convolutions to replace, counted from the end: 3 for the backbones of section 4.6",
        shown="all",
    )
    block: int = option(8, "size b of the blocks of b x b queries", check=expect_whole)
    halo: int = option(3, "size h of the halo: a block reads (b + 2h) x (b + 2h) pixels", check=expect_whole)
    channels_per_head: int = option(16, "channels of the values of a head", check=expect_whole)
    position: Position = option(
        "relative",
        'position encoding: "relative", "absolute" (appendix F) or "none"',
        check=one_of("relative", "absolute", "none"),
    )
    centered: bool = option(False, "use the windows of SASA, the 2h + 1 pixels around each query", check=expect_flag)
    downsampling: Downsampling = option(
        "queries",
        'in strided layers: strided "queries", or average "pooling" after the attention, as in SASA (section 2.2)',
        check=one_of("queries", "pooling"),
    )


def place_local_attention(
    model: nn.Module, options: LocalAttentionOptions, *, image_size: int | Grid | None = None
) -> None:
    """Replace 3x3 convolutions of a network of residual stages by local attention."""
    name = type(model).__name__
    stages, last, channels_per_head = options.stages, options.last, options.channels_per_head
    numbered = stages is None or (isinstance(stages, Sequence | Set) and all(map(_is_whole, stages)))
    if not numbered or not (last is None or _is_whole(last)) or channels_per_head < 2:
        raise AttachError(
            f"expected stages such as (3, 4), a whole number for last and channels_per_head of at least 2, got "
            f"{stages=}, {last=}, {channels_per_head=}"
        )
    found = spatial_convolutions(model, image_size)
    if not found:
        raise AttachError(
            f"{name} has no 3x3 convolutions that local attention could replace: with all channels in one group, in "
            f"stages that its feature_info lists and that are sequences of blocks"
        )
    numbers = sorted({stage for stage, _, _, _ in found})
    if stages is not None:
        unknown = [stage for stage in stages if stage not in numbers]
        if unknown or not stages:
            raise AttachError(f"{name} has stages {numbers[0]} to {numbers[-1]}, got stages={tuple(stages)}")
        found = [entry for entry in found if entry[0] in stages]
    if last is not None:
        if not 1 <= last <= len(found):
            raise AttachError(f"expected last from 1 to {len(found)}, the number of convolutions, got {last}")
        found = found[-last:]
    layers = [_attention(path, conv, size, options) for _, path, conv, size in found]
    for (_, path, conv, _), layer in zip(found, layers, strict=True):
        match(layer, conv)
        replace(model, path, layer)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _attention(path: str, conv: nn.Conv2d, size: tuple[int, int], options: LocalAttentionOptions) -> HaloAttention2d:
    channels_per_head = options.channels_per_head
    if conv.out_channels % channels_per_head or conv.in_channels % channels_per_head or channels_per_head % 2:
        raise AttachError(
            f"expected an even channels_per_head that divides the {conv.in_channels} and {conv.out_channels} channels "
            f"of {path}, got {channels_per_head}"
        )
    heads = conv.out_channels // channels_per_head
    if conv.in_channels % (2 * heads):
        raise AttachError(f"{path} has {conv.in_channels} input channels, which {heads} heads do not divide evenly")
    stride = int(conv.stride[0])
    if options.downsampling == "queries" and options.block % stride:
        raise AttachError(f"expected a block divisible by the stride {stride} of {path}, got {options.block}")
    return HaloAttention2d(
        conv.in_channels, conv.out_channels, heads=heads, block=options.block, halo=options.halo, stride=stride,
        centered=options.centered, position=options.position, size=size, downsampling=options.downsampling,
    )  # fmt: skip


def local_attentions(model: nn.Module) -> list[tuple[str, Any]]:
    """Returns name and module of every local attention that replaced a convolution."""
    return [(name, layer) for name, layer in replaced_layers(model) if isinstance(layer, HaloAttention2d)]


def take_out_local_attention(model: nn.Module) -> None:
    """Undo `place_local_attention`: the convolutions are restored with their weights."""
    put_back(model, HaloAttention2d)


def spatial_convolutions(
    model: nn.Module, image_size: int | Grid | None
) -> list[tuple[int, str, nn.Conv2d, tuple[int, int]]]:
    """Returns stage, name, module and input size of every plain 3x3 convolution in the stages, in execution order.

    The stages are those that the network lists in `feature_info`, without the stem. Convolutions inside a layer that
    replaced another one are left out.
    """
    listed = [getattr(module, "feature_info", None) for module in model.modules()]
    info: Any = next((entry for entry in listed if entry), [])
    entries = info.info if hasattr(info, "info") else info
    names = [str(entry.get("module", "")) for entry in entries if isinstance(entry, dict)]
    stages = [name for name in names if name and type(_module(model, name)) is nn.Sequential]
    inside = tuple(f"{name}." for name, _ in replaced_layers(model))
    found = []
    for call in record_calls(model, probe_image(model, image_size)):
        stage = next((n for n, prefix in enumerate(stages, start=1) if call.name.startswith(f"{prefix}.")), None)
        conv = call.module
        if stage is None or type(conv) is not nn.Conv2d or call.input is None or call.name.startswith(inside):
            continue
        if conv.kernel_size == (3, 3) and conv.dilation != (1, 1):
            raise AttachError(
                f"{call.name} of {type(model).__name__} is dilated, which local attention is not (output_stride, if "
                f"given, dilates convolutions: build the network without output_stride)"
            )
        plain = conv.kernel_size == (3, 3) and conv.groups == 1
        plain = plain and conv.stride in ((1, 1), (2, 2)) and conv.padding in ((1, 1), "same")
        if plain and ".downsample." not in call.name:
            found.append((stage, call.name, conv, (call.input.shape[2], call.input.shape[3])))
    return found


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
