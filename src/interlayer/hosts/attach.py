"""attach(): put a mechanism into a network, and detach(): take it out again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from timm.layers import DropPath, LayerNorm2d
from torch import Tensor, nn

from ..mechanisms import MLA, LayerAttention, MRLABase, MRLALight, MRLALinear
from ..mechanisms.mrla import Init, Reading, Style
from .carry import AttachedBlock, AttachedModel, Extended, RecordingPatchEmbed, Slot, extend, restore
from .layout import Grid
from .probe import AttachError, evaluating, probe_image, reason
from .stages import Block, Stage, Stages, find_stages

SLOT = "mrla"  # the name under which a block holds its layer attention, and so the prefix of its parameters


@dataclass(frozen=True)
class Mechanism:
    """A row of the table of what can be attached."""

    make: type[LayerAttention]
    defaults: Mapping[str, Any] = field(default_factory=dict)


MECHANISMS = {
    "mrla_light": Mechanism(MRLALight),
    "mrla_base": Mechanism(MRLABase),
    "mla": Mechanism(MLA),
    "mrla_linear": Mechanism(MRLALinear),
    "crla": Mechanism(MRLALight, {"channels_per_head": 1}),
}

CHANNELS_PER_HEAD = {"cnn": 32, "mbconv": 8, "transformer": 16}  # section 5.1


def attach(
    model: nn.Module,
    mechanism: str,
    *,
    stages: Stages | None = None,
    blocks: Literal["auto", "all"] = "auto",
    channels_per_head: int | None = None,
    drop_path: float | Literal["backbone"] = 0.0,
    reading: Reading = "paper",
    init: Init = "paper",
    image_size: int | Grid | None = None,
    **options: Any,
) -> nn.Module:
    """Put layer attention after the blocks of `model`, in place, and return the model.

    The network keeps its own parameters under their own names; those of the attention are added as `<block>.mrla.*`.

    Args:
        model: a timm model, trained or not, `features_only` ones included, or any network built of blocks in stages.
        mechanism: "mrla_light", "mrla_base", "mla", "mrla_linear" or "crla".
        stages: the stages instead of those found: lengths such as (6, 6), or block names such as
            [["layer3.0", "layer3.1"], ["layer4.0"]].
        blocks: "auto" leaves out the blocks that say they have no identity skip (in EfficientNets, the first of a
            stage), as the paper does; "all" takes every block. Blocks named in `stages` are all taken.
        channels_per_head: 32 in a CNN, 8 in a network of MBConv blocks, 16 in a transformer unless given; where that
            does not divide a stage's width, the largest smaller divisor. A number given here must divide every width.
        drop_path: the attention's own stochastic depth: a probability, or "backbone" to share each block's.
        reading: "paper" or "published"; see docs/deviations.md.
        init: "paper" for training from scratch; "identity" leaves the network's function as it is, for fine-tuning.
        image_size: size of the image used to find the stages, where the model does not tell its own.
        options: further options of the mechanism, such as memory=False; see `interlayer.mechanisms`.

    Raises:
        AttachError: the network has no place for the mechanism; the model is left as it was.

    >>> model = timm.create_model("resnet50", pretrained=True)
    >>> model = interlayer.attach(model, "mrla_light", init="identity")
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach expects a torch.nn.Module, got {type(model).__name__}")
    if mechanism not in MECHANISMS:
        raise ValueError(f"unknown mechanism {mechanism!r}, expected one of {', '.join(MECHANISMS)}")
    if blocks not in ("auto", "all"):
        raise ValueError(f"blocks must be 'auto' or 'all', got {blocks!r}")
    if drop_path != "backbone" and not (isinstance(drop_path, int | float) and 0 <= drop_path < 1):
        raise ValueError(f"drop_path must be a probability below 1 or 'backbone', got {drop_path!r}")
    if any(True for _ in attached_blocks(model)):
        raise AttachError(f"{type(model).__name__} already has layer attention: detach it first")
    row = MECHANISMS[mechanism]
    _check_options(mechanism, row.make, options)
    if channels_per_head is None:
        channels_per_head = row.defaults.get("channels_per_head")
    elif "channels_per_head" in row.defaults and channels_per_head != row.defaults["channels_per_head"]:
        raise ValueError(f"{mechanism} has channels_per_head=1, got {channels_per_head}; mrla_light takes any number")
    if channels_per_head is not None and not isinstance(channels_per_head, int):
        raise TypeError(f"channels_per_head must be a whole number, got {channels_per_head!r}")

    norm_layer = _norm_layer_for(model)
    placed: list[tuple[Stage, list[Block], list[LayerAttention]]] = []
    for stage in find_stages(model, stages=stages, image_size=image_size):
        chosen = [block for block in stage.blocks if blocks == "all" or stages is not None or block.identity_skip]
        style: Style = "cnn" if stage.layout.kind == "NCHW" else "transformer"
        per_head = _default_channels_per_head(stage, style) if channels_per_head is None else channels_per_head
        made = [
            row.make(
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
    try:
        for number, (stage, chosen, made) in enumerate(placed):
            _install(model, number, stage, chosen, made)
        with evaluating(model), torch.no_grad():
            model(probe_image(model, image_size))
    except Exception as error:
        detach(model)
        raise AttachError(
            f"{type(model).__name__} does not run with {mechanism} in its blocks and was left as it was: "
            f"{reason(error)}"
        ) from error
    return model


def detach(model: nn.Module) -> nn.Module:
    """Take out what `attach` put into `model`, in place, and return the network as it was, with its present weights."""
    found = [module for module in model.modules() if isinstance(module, Extended)]
    if not found:
        raise ValueError(f"{type(model).__name__} has nothing attached")
    for module in found:
        if isinstance(module, AttachedBlock):
            for slot in module.interlayer_slots:
                delattr(module, slot.name)
            del module.interlayer_slots, module.interlayer_layout
        if isinstance(module, RecordingPatchEmbed):
            del module.interlayer_grids
        restore(module)  # type: ignore[arg-type]
    return model


def attached_blocks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of every block that something is attached to."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, AttachedBlock))


def attached_mechanisms(model: nn.Module) -> dict[str, LayerAttention]:
    """Every attached mechanism by its name in the model."""
    return {
        f"{name}.{slot.name}".removeprefix("."): getattr(block, slot.name)
        for name, block in attached_blocks(model)
        for slot in block.interlayer_slots
    }


@dataclass(frozen=True)
class LoadReport:
    """What `load_backbone` placed and what it could not place."""

    placed: list[str]
    missing: list[str]  # parameters of the backbone that the state dict lacks
    unexpected: list[str]  # entries of the state dict that the backbone lacks
    mismatched: list[str]  # entries whose shapes differ

    @property
    def complete(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        parts = [("missing", self.missing), ("unexpected", self.unexpected), ("of another shape", self.mismatched)]
        return "; ".join(f"{len(names)} {what}: {_some(names)}" for what, names in parts if names) or "all placed"


def load_backbone(model: nn.Module, state_dict: Mapping[str, Tensor], *, strict: bool = True) -> LoadReport:
    """Load a plain backbone's weights into a model with attached mechanisms, whose own parameters stay as they are.

    Args:
        model: an attached model.
        state_dict: the weights of the same backbone without attachment.
        strict: raise, with nothing loaded, unless every entry has its place and the other way round.

    Returns:
        What was placed, and the names of what could not be.
    """
    own = {f"{name}." for name in attached_mechanisms(model)}
    ours = {k: v for k, v in model.state_dict().items() if not k.startswith(tuple(own))} if own else model.state_dict()
    shared = [name for name in state_dict if name in ours]
    report = LoadReport(
        placed=[name for name in shared if ours[name].shape == state_dict[name].shape],
        missing=[name for name in ours if name not in state_dict],
        unexpected=[name for name in state_dict if name not in ours],
        mismatched=[
            f"{name} {tuple(state_dict[name].shape)}, expected {tuple(ours[name].shape)}"
            for name in shared
            if ours[name].shape != state_dict[name].shape
        ],
    )
    if strict and not report.complete:
        raise ValueError(f"these are not the weights of this backbone, nothing was loaded: {report}")
    model.load_state_dict({name: state_dict[name] for name in report.placed}, strict=False)
    return report


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


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
        reference = next(p for p in block.module.parameters() if p.is_floating_point())
        mechanism.layer = index
        mechanism.to(device=reference.device, dtype=reference.dtype).train(block.module.training)
        block.module.add_module(SLOT, mechanism)
        block.module.interlayer_slots = (Slot(SLOT, number, index, len(blocks)),)  # type: ignore[assignment]
        block.module.interlayer_layout = stage.layout  # type: ignore[assignment]
        extend(block.module, AttachedBlock)
    embed = stage.layout.patch_embed
    if embed is not None and not getattr(embed, "strict_img_size", True) and not isinstance(embed, RecordingPatchEmbed):
        embed.interlayer_grids = {}  # type: ignore[assignment]
        extend(embed, RecordingPatchEmbed)
    for name, module in model.named_modules():
        runs_blocks = not name or any(block.name.startswith(f"{name}.") for block in blocks)
        hands_out_features = not name or hasattr(module, "forward_intermediates")
        if runs_blocks and hands_out_features and not isinstance(module, AttachedModel):
            extend(module, AttachedModel)
