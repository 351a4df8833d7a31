"""Places context broadcasting in the MLPs or the attention of transformers and mixers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from timm.models.vision_transformer import Attention
from torch import nn

from ...mechanisms.broadcast import ContextBroadcast, UniformHead, UniformHeadAttention
from ...mechanisms.options import OptionError, expect_flag, one_of, option
from ...mechanisms.protocol import Place
from ..block import AttachedBlock, add_entry, entry_of, remove_entries
from ..carried import Grid, release_from
from ..finding.blocks import find_chains
from ..finding.probe import AttachError, match, run_once, vilt_of
from .blocks import are_block_numbers, check_block_numbers
from .replaced import put_back, replace, replaced_layers
from .vilt import KEY, BroadcastingOutput, Tokens, place_in_vilt, take_out_of_vilt

Where = Literal["end", "middle", "front", "attention", "both", "head", "wide_head", "extra_head"]
HEADS = ("head", "wide_head", "extra_head")
COMPONENTS = {  # components of a block, by their names in timm's transformers and mixers, and in transformers
    "end": ("mlp", "mlp_channels"),
    "front": ("mlp", "mlp_channels"),
    "middle": ("mlp.act", "mlp_channels.act"),
    "attention": ("attn", "attention"),
}


def _expect_pyramid(name: str, value: Any) -> None:
    if not isinstance(value, bool) and not are_block_numbers(value):
        raise OptionError(
            f"{name} must be true, false or the numbers of blocks from 0 such as [3, 5, 7, 11], got {value!r}"
        )


@dataclass(frozen=True, kw_only=True)
class ContextBroadcastOptions:
    """Options of context broadcasting (Tables 1, 2 and 4)."""

    where: Where = option(
        "end",
        'at the "end", in the "middle" or at the "front" of the MLP, after the "attention", or "both" at the end of '
        'the MLP and after the attention (Table 4); as a uniform "head" that replaces a head of the attention, a '
        '"wide_head" with an equal number of parameters, or an "extra_head" (Table 1)',
        check=one_of("end", "middle", "front", "attention", "both", *HEADS),
    )  # fmt: skip
    blocks: Literal["upper", "all"] = option(
        "upper", 'the "upper" half of the blocks, or "all" (Table 2)', check=one_of("upper", "all")
    )
    scaled: bool = option(
        False, "CB_S: the average is scaled by one learnable factor per channel, initialized to zero", check=expect_flag
    )
    spare_pyramid: bool | Sequence[int] = option(
        False,
        "skip the blocks that the feature pyramid of a detector reads (section 4.4): their numbers from 0 through all "
        "stages, such as [3, 5, 7, 11], or True for the last block of every stage, and in a network of one stage for "
        "the blocks at one third, one half, two thirds and the end of its depth",
        check=_expect_pyramid,
    )
    tokens: Tokens = option(
        "both", 'the tokens of Hugging Face\'s ViLT: "image", "text" or "both" (section 4.7), without padding',
        check=one_of("image", "text", "both"),
    )  # fmt: skip


def place_context_broadcast(
    model: nn.Module, options: ContextBroadcastOptions, *, image_size: int | Grid | None = None
) -> None:
    """Add context broadcasting to the blocks of a transformer or mixer."""
    where, scaled, spare_pyramid = options.where, options.scaled, options.spare_pyramid
    name = type(model).__name__
    vilt = vilt_of(model)
    if vilt is not None:
        if where != "end" or spare_pyramid:
            raise AttachError(f"{name} takes context broadcasting at the end of its MLPs alone: where='end'")
        place_in_vilt(vilt, upper=options.blocks == "upper", scaled=scaled, tokens=options.tokens)
        return
    if options.tokens != "both":
        raise AttachError(f"{name} has image tokens alone: tokens={options.tokens!r} is for ViLT")
    chains = find_chains(model, image_size)
    found = [block for chain in chains for block in chain]
    if not found:
        raise AttachError(f"{name} has no blocks: context broadcasting is for transformers and mixers")
    spared = _spared([len(chain) for chain in chains], spare_pyramid, name)
    first = 0 if options.blocks == "all" else len(found) // 2
    chosen = [block for number, block in enumerate(found) if number >= first and number not in spared]
    if not chosen:
        raise AttachError(
            f"{name} has no blocks left for context broadcasting: spare_pyramid leaves out {sorted(spared)}"
        )
    if where in HEADS:
        if scaled:
            raise AttachError(f"where={where!r} is a head of the attention, which has no scaled form")
        _place_heads(model, chosen, where, name)  # type: ignore[arg-type]
        return
    places = ["attention", "end"] if where == "both" else [where]
    components = [(component_of(block, place, name), place) for block in chosen for place in places]
    widths = token_widths(model, components, name, image_size)
    for number, (component, place) in enumerate(components):
        broadcast = ContextBroadcast(widths[component], scaled=scaled)
        broadcast.before = place == "front"
        match(broadcast, model)
        add_entry(component, KEY, broadcast, Place(0, number, len(components)))
    release_from(model, [block.name for block in chosen])


def _spared(depths: Sequence[int], spare_pyramid: bool | Sequence[int], name: str) -> set[int]:
    """Returns the numbers of the blocks that a feature pyramid reads, counted from 0 through all stages.

    The paper follows the protocols of Swin, with a pyramid of the last map of each stage, and of XCiT, with a pyramid
    of the blocks 3, 5, 7 and 11 of 12, or 7, 11, 15 and 23 of 24.
    """
    total = sum(depths)
    if not isinstance(spare_pyramid, bool):
        check_block_numbers("spare_pyramid", spare_pyramid, total, name)
        return set(spare_pyramid)
    if not spare_pyramid:
        return set()
    if len(depths) > 1:
        return {end - 1 for end in accumulate(depths)}
    return {max(end, 1) - 1 for end in (total // 3, total // 2, 2 * total // 3, total)}


def _place_heads(model: nn.Module, blocks: list[Any], kind: UniformHead, name: str) -> None:
    layers = []
    for block in blocks:
        attention: Any = getattr(block.module, "attn", None)
        if type(attention) is not Attention:
            raise AttachError(
                f"{block.name} of {name} has {type(attention).__name__} where timm's plain Attention was expected"
            )
        plain = all(isinstance(getattr(attention, norm, None), nn.Identity) for norm in ("q_norm", "k_norm", "norm"))
        if not plain or getattr(attention, "gate", None) is not None or attention.attn_drop.p or attention.proj_drop.p:
            raise AttachError(f"the attention of {block.name} in {name} has norms, a gate or dropout")
        channels, bias = attention.qkv.in_features, attention.qkv.bias is not None
        if channels != attention.num_heads * attention.head_dim or attention.proj.out_features != channels:
            raise AttachError(f"the heads of {block.name} in {name} do not add up to its {channels} channels")
        proj_bias = attention.proj.bias is not None
        layer = UniformHeadAttention(channels, attention.num_heads, kind, bias=bias, proj_bias=proj_bias)
        match(layer, attention)
        layer.take_over(attention.qkv, attention.proj)
        layers.append((f"{block.name}.attn", layer))
    for path, layer in layers:
        replace(model, path, layer)


def component_of(block: Any, place: str, name: str) -> nn.Module:
    """Returns the component of a block at a place of `COMPONENTS`, such as its MLP."""
    for path in COMPONENTS[place]:
        try:
            component = block.module.get_submodule(path)
        except AttributeError:
            continue
        if any(isinstance(module, nn.Conv2d) for module in component.modules()) and place != "attention":
            raise AttachError(f"the MLP of {block.name} in {name} convolves: context broadcasting takes token MLPs")
        return component
    raise AttachError(
        f"{block.name} of {name} has no {COMPONENTS[place][0]}: context broadcasting is for transformers and mixers"
    )


def token_widths(
    model: nn.Module, components: list[tuple[nn.Module, str]], name: str, image_size: int | Grid | None
) -> dict[nn.Module, int]:
    """Returns the output channels of each component, which must return the tokens of one image."""
    shapes: dict[nn.Module, tuple[int, ...]] = {}

    def record(module: nn.Module, args: Any, output: Any) -> None:
        shapes[module] = tuple((output[0] if isinstance(output, tuple) else output).shape)

    handles = [component.register_forward_hook(record) for component, _ in components]
    try:
        run_once(model, image_size)
    finally:
        for handle in handles:
            handle.remove()
    for component, place in components:
        shape = shapes[component]
        layers = [module for module in component.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
        linear = [module.out_features for module in layers if isinstance(module, nn.Linear)]
        channels_last = shape[-1] == linear[-1] if linear else not layers  # only convolutions: [B, C, H, W]
        if len(shape) not in (3, 4) or shape[0] != 1 or not channels_last:
            raise AttachError(
                f"{name} gives {shape} at where={place!r} for one image, not its tokens, [1, N, C] or [1, H, W, C]: "
                f"their mean would not be over the image"
            )
    return {component: shape[-1] for component, shape in shapes.items()}


def broadcasts(model: nn.Module) -> list[tuple[str, Any]]:
    """Returns name and module of every `ContextBroadcast` and `UniformHeadAttention`."""
    found = [
        (f"{name}.{KEY}", getattr(module, KEY))
        for name, module in model.named_modules()
        if isinstance(module, BroadcastingOutput) or (isinstance(module, AttachedBlock) and entry_of(module, KEY))
    ]
    return found + [(name, layer) for name, layer in replaced_layers(model) if isinstance(layer, UniformHeadAttention)]


def take_out_broadcasts(model: nn.Module) -> None:
    """Undo `place_context_broadcast`."""
    remove_entries(model, (KEY,))
    put_back(model, UniformHeadAttention)
    take_out_of_vilt(model)
