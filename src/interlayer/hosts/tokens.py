"""Putting context broadcasting into the blocks of transformers and mixers."""

from __future__ import annotations

from typing import Any, Literal

from timm.models.vision_transformer import Attention
from torch import Tensor, nn

from ..mechanisms.broadcast import ContextBroadcast, UniformHead, UniformHeadAttention
from ..mechanisms.description import expect_choice
from .carry import Extended, extend, release_from, restore
from .layout import Grid
from .probe import AttachError, match, run_once, vilt_of
from .replace import put_back, replace, replaced_layers
from .stages import find_chains
from .vilt import SLOT, BroadcastingOutput, Tokens, place_in_vilt, take_out_of_vilt

Where = Literal["end", "middle", "front", "attention", "both", "head", "wide_head", "extra_head"]
HEADS = ("head", "wide_head", "extra_head")
PARTS = {  # of a block, by the names timm's transformers and mixers give them
    "end": ("mlp", "mlp_channels"),
    "front": ("mlp", "mlp_channels"),
    "middle": ("mlp.act", "mlp_channels.act"),
    "attention": ("attn",),
}


class Broadcasting(Extended):
    """A part of a block that broadcasts the context before it runs, or after."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        broadcast: Any = getattr(self, SLOT)
        if broadcast.before:
            return super().forward(broadcast(x), *args, **kwargs)  # type: ignore[misc]
        return broadcast(super().forward(x, *args, **kwargs))  # type: ignore[misc]


def place_cb(
    model: nn.Module,
    *,
    where: Where = "end",
    blocks: Literal["upper", "all"] = "upper",
    scaled: bool = False,
    spare_pyramid: bool = False,
    tokens: Tokens = "both",
    image_size: int | Grid | None = None,
) -> None:
    """Broadcast the context in the blocks of `model` (Tables 2 and 4).

    Args:
        model: a transformer or mixer of timm's.
        where: at the "end", in the "middle" or at the "front" of the MLP, after the "attention", or "both" after the
            attention and at the end of the MLP. Or as a uniform head of the attention (Table 1): in the place of a
            "head", as a "wide_head" with as many parameters as before, or as an "extra_head".
        blocks: the "upper" half of them, or "all".
        scaled: CB_S, with one parameter for each channel.
        tokens: of Hugging Face's ViLT, whether "image" or "text" tokens or "both" take part (section 4.7).
        spare_pyramid: leave out the last block of every stage, whose features a detector's pyramid reads (section 4.4).
    """
    expect_choice("where", where, ("end", "middle", "front", "attention", "both", *HEADS))
    expect_choice("blocks", blocks, ("upper", "all"))
    expect_choice("tokens", tokens, ("image", "text", "both"))
    name = type(model).__name__
    vilt = vilt_of(model)
    if vilt is not None:
        if where != "end" or spare_pyramid:
            raise AttachError(f"{name} takes context broadcasting at the end of its MLPs alone: where='end'")
        place_in_vilt(vilt, upper=blocks == "upper", scaled=scaled, tokens=tokens)
        return
    if tokens != "both":
        raise AttachError(f"{name} has image tokens alone: tokens={tokens!r} is for ViLT")
    chains = find_chains(model, image_size)
    found = [(block, number == len(chain) - 1) for chain in chains for number, block in enumerate(chain)]
    if not found:
        raise AttachError(f"{name} has no blocks: context broadcasting is for transformers and mixers")
    chosen = found if blocks == "all" else found[len(found) // 2 :]
    chosen = [entry for entry in chosen if not (spare_pyramid and entry[1])]
    if not chosen:
        raise AttachError(f"{name} has no block left to broadcast in: every one ends a stage")
    if where in HEADS:
        if scaled:
            raise AttachError(f"where={where!r} is a head of the attention, which has no scaled form")
        _place_heads(model, [block for block, _ in chosen], where, name)  # type: ignore[arg-type]
        return
    places = ["attention", "end"] if where == "both" else [where]
    parts = [(_part(block, place, name), place) for block, _ in chosen for place in places]
    widths = _widths(model, parts, name, image_size)
    for part, place in parts:
        broadcast = ContextBroadcast(widths[part], scaled=scaled)
        broadcast.before = place == "front"
        match(broadcast, model)
        part.add_module(SLOT, broadcast)
        extend(part, Broadcasting)
    release_from(model, [block.name for block, _ in chosen])


def _place_heads(model: nn.Module, blocks: list[Any], kind: UniformHead, name: str) -> None:
    made = []
    for block in blocks:
        attention: Any = getattr(block.module, "attn", None)
        if type(attention) is not Attention:
            raise AttachError(
                f"{block.name} of {name} has {type(attention).__name__} where timm's plain Attention was expected"
            )
        plain = all(isinstance(getattr(attention, part, None), nn.Identity) for part in ("q_norm", "k_norm", "norm"))
        if not plain or getattr(attention, "gate", None) is not None or attention.attn_drop.p or attention.proj_drop.p:
            raise AttachError(f"the attention of {block.name} in {name} has norms, a gate or dropout")
        channels, bias = attention.qkv.in_features, attention.qkv.bias is not None
        if channels != attention.num_heads * attention.head_dim or attention.proj.out_features != channels:
            raise AttachError(f"the heads of {block.name} in {name} do not share out its {channels} channels")
        proj_bias = attention.proj.bias is not None
        layer = UniformHeadAttention(channels, attention.num_heads, kind, bias=bias, proj_bias=proj_bias)
        match(layer, attention)
        layer.take_over(attention.qkv, attention.proj)
        made.append((f"{block.name}.attn", layer))
    for path, layer in made:
        replace(model, path, layer)


def _part(block: Any, place: str, name: str) -> nn.Module:
    for path in PARTS[place]:
        try:
            part = block.module.get_submodule(path)
        except AttributeError:
            continue
        if any(isinstance(module, nn.Conv2d) for module in part.modules()) and place != "attention":
            raise AttachError(f"the MLP of {block.name} in {name} convolves: context broadcasting takes token MLPs")
        return part
    raise AttachError(
        f"{block.name} of {name} has no {PARTS[place][0]}: context broadcasting is for transformers and mixers"
    )


def _widths(
    model: nn.Module, parts: list[tuple[nn.Module, str]], name: str, image_size: int | Grid | None
) -> dict[nn.Module, int]:
    """The channels that each part returns; refuses parts that return something else than the tokens of one image."""
    shapes: dict[nn.Module, tuple[int, ...]] = {}
    handles = [
        part.register_forward_hook(lambda part, args, output: shapes.__setitem__(part, tuple(output.shape)))
        for part, _ in parts
    ]
    try:
        run_once(model, image_size)
    finally:
        for handle in handles:
            handle.remove()
    for part, place in parts:
        shape = shapes[part]
        layers = [module for module in part.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
        linear = [module.out_features for module in layers if isinstance(module, nn.Linear)]
        channels_last = shape[-1] == linear[-1] if linear else not layers  # convolutions alone give [B, C, H, W]
        if len(shape) not in (3, 4) or shape[0] != 1 or not channels_last:
            raise AttachError(
                f"{name} gives {shape} at where={place!r} for one image, not its tokens, [1, N, C] or [1, H, W, C]: "
                f"their mean would not be over the image"
            )
    return {part: shape[-1] for part, shape in shapes.items()}


def broadcasting_parts(model: nn.Module) -> list[tuple[str, Any]]:
    """Name and broadcast of every part that has one, and every attention with a uniform head."""
    parts = [
        (f"{name}.{SLOT}", getattr(module, SLOT))
        for name, module in model.named_modules()
        if isinstance(module, (Broadcasting, BroadcastingOutput))
    ]
    return parts + [(name, layer) for name, layer in replaced_layers(model) if isinstance(layer, UniformHeadAttention)]


def take_out_cb(model: nn.Module) -> None:
    """Undo `place_cb`."""
    for module in list(model.modules()):
        if isinstance(module, Broadcasting):
            delattr(module, SLOT)
            restore(module)  # type: ignore[arg-type]
    put_back(model, UniformHeadAttention)
    take_out_of_vilt(model)
