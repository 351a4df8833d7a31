"""attach(): put a mechanism into a network, and detach(): take it out again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..mechanisms import MLA, RLA, MRLABase, MRLALight, MRLALinear
from ..mechanisms.branch import BranchGate
from ..mechanisms.description import Init, Reading
from .behind import has_layer_attention, place_layer_attention, take_out_layer_attention
from .carry import AttachedBlock, Extended, restore
from .inside import has_gates, has_rla, own_inputs, place_gates, place_rla, take_out_gates, take_out_rla
from .layout import Grid
from .probe import AttachError, reason, run_once
from .replace import replaced_layers
from .spatial import local_attentions, place_halo, take_out_halo
from .stages import Stages
from .tokens import broadcasting_parts, place_cb, take_out_cb


@dataclass(frozen=True)
class Kind:
    """What mechanisms of a kind have in common. A network has at most one of a kind; different kinds go together."""

    name: str
    present: Callable[[nn.Module], object]
    take_out: Callable[[nn.Module], None]


BEHIND = Kind("layer attention", has_layer_attention, take_out_layer_attention)
STATEFUL = Kind("recurrent layer aggregation", has_rla, take_out_rla)
ON_BRANCH = Kind("attention on the branch", has_gates, take_out_gates)
SPATIAL = Kind("local attention", local_attentions, take_out_halo)
BROADCAST = Kind("context broadcasting", broadcasting_parts, take_out_cb)
KINDS = (BEHIND, STATEFUL, ON_BRANCH, SPATIAL, BROADCAST)


@dataclass(frozen=True)
class Mechanism:
    """A row of the table of what can be attached. What `place` returns is called once the network has run with it."""

    place: Callable[..., Callable[[], None] | None]
    kind: Kind


def _behind(name: str, make: type, channels_per_head: int | None = None) -> Mechanism:
    place = partial(place_layer_attention, make=make, mechanism=name, fixed_channels_per_head=channels_per_head)
    return Mechanism(place, BEHIND)


MECHANISMS = {
    "mrla_light": _behind("mrla_light", MRLALight),
    "mrla_base": _behind("mrla_base", MRLABase),
    "mla": _behind("mla", MLA),
    "mrla_linear": _behind("mrla_linear", MRLALinear),
    "crla": _behind("crla", MRLALight, channels_per_head=1),
    "rla": Mechanism(place_rla, STATEFUL),
    "halo": Mechanism(place_halo, SPATIAL),
    "cb": Mechanism(place_cb, BROADCAST),
    **{
        name: Mechanism(partial(place_gates, kind=name), ON_BRANCH)
        for name in ("se", "eca", "cbam", "gc", "nl", "dia", "bridge")
    },
}


def attach(
    model: nn.Module,
    mechanism: str,
    *,
    stages: Stages | None = None,
    reading: Reading = "paper",
    init: Init = "paper",
    image_size: int | Grid | None = None,
    **options: Any,
) -> nn.Module:
    """Put a mechanism into `model`, in place, and return the model.

    The network keeps its own parameters under their own names; those of layer attention are added as `<block>.mrla.*`,
    those of recurrent layer aggregation as `rla.*`, of attention on the branch as `<block>.eca_gate.*`. Mechanisms
    of different kinds can be attached one after another.

    Args:
        model: a timm model, trained or not, `features_only` ones included, or any network built of blocks in stages.
        mechanism: layer attention behind the blocks: "mrla_light", "mrla_base", "mla", "mrla_linear" or "crla". A
            recurrent state inside residual blocks: "rla". Attention on the branch of residual blocks, for comparison:
            "se", "eca", "cbam", "gc", "nl", "dia" (one LSTM a stage) or "bridge". Local attention in place of 3x3
            convolutions: "halo". Context broadcasting in transformers: "cb".
        stages: of layer attention, the stages instead of those found: lengths such as (6, 6), or block names such as
            [["layer3.0", "layer3.1"], ["layer4.0"]].
        reading: "paper" or "published"; see docs/deviations.md.
        init: "paper" for training from scratch; "identity" leaves the network's function as it is, for fine-tuning.
        image_size: size of the image used to find the stages, where the model does not tell its own.
        options: further options of the mechanism; docs/attaching.md lists them. Of layer attention among others:
            blocks: "auto" leaves out the blocks that say they have no identity skip (in EfficientNets, the first of a
                stage), as the paper does; "all" takes every block. Blocks named in `stages` are all taken.
            channels_per_head: 32 in a CNN, 8 in a network of MBConv blocks, 16 in a transformer unless given; where
                that does not divide a stage's width, the largest smaller divisor. A number given must divide every
                width.
            drop_path: the attention's own stochastic depth: a probability, or "backbone" to share each block's.
            Of "halo": stages (here numbers from 1), last, block, halo, channels_per_head, position, centered.
            Of "cb": where ("end", "middle", "front", "attention", "both", "head", "wide_head", "extra_head"), blocks
            ("upper", "all"), scaled, spare_pyramid, and of Hugging Face's ViLT tokens ("image", "text", "both").
            Of "rla": state_channels, variant ("v1" to "v6", "postact", "convlstm", ...) and those of
            `interlayer.mechanisms.RLA`.

    Raises:
        AttachError: the network has no place for the mechanism; the model is left as it was.

    >>> model = timm.create_model("resnet50", pretrained=True)
    >>> model = interlayer.attach(model, "mrla_light", init="identity")
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach expects a torch.nn.Module, got {type(model).__name__}")
    row = _row(mechanism)
    common = {"stages": stages, "reading": reading, "init": init}
    unset: dict[str, Any] = {"stages": None, "reading": "paper", "init": "paper"}
    options |= {name: value for name, value in common.items() if value != unset[name]}
    _check_options(mechanism, options)
    there = _kinds(model)
    if row.kind in there:
        raise AttachError(f"{type(model).__name__} already has {row.kind.name}: detach it first")
    try:
        finish = row.place(model, image_size=image_size, **options)
        run_once(model, image_size)
        if finish is not None:
            finish()
    except Exception as error:
        placed = [kind for kind in _kinds(model) if kind not in there]
        _take_out(model, placed)
        if not placed:
            raise  # nothing was placed: the error says why
        raise AttachError(
            f"{type(model).__name__} does not run with {mechanism} in its blocks and was left as it was: "
            f"{reason(error)}"
        ) from error
    return model


def detach(model: nn.Module) -> nn.Module:
    """Take out all that `attach` put into `model`, in place, and return the network, with its present weights."""
    if not _kinds(model):
        raise ValueError(f"{type(model).__name__} has nothing attached")
    _take_out(model, _kinds(model))
    return model


def _row(mechanism: str) -> Mechanism:
    if mechanism not in MECHANISMS:
        raise ValueError(f"unknown mechanism {mechanism!r}, expected one of {', '.join(MECHANISMS)}")
    return MECHANISMS[mechanism]


def options_of(mechanism: str) -> set[str]:
    """The options of `attach` that a mechanism takes; layer attention takes those of its module too."""
    place = _row(mechanism).place
    bound = place.keywords if isinstance(place, partial) else {}
    return {name for name in inspect.signature(place).parameters if name not in ("model", "image_size", *bound)}


def _check_options(mechanism: str, options: Mapping[str, Any]) -> None:
    """Refuse an option the mechanism does not have; layer attention checks its own."""
    if MECHANISMS[mechanism].kind == BEHIND:
        return
    valid = options_of(mechanism)
    unknown = [name for name in options if name not in valid]
    if unknown:
        expected = f"expected one of {', '.join(sorted(valid))}" if valid else "it has none"
        raise TypeError(f"{mechanism} has no option {unknown[0]!r}, {expected}")


def _kinds(model: nn.Module) -> list[Kind]:
    """The kinds of mechanisms in a network."""
    return [kind for kind in KINDS if kind.present(model)]


def _take_out(model: nn.Module, kinds: Sequence[Kind]) -> None:
    for kind in kinds:
        kind.take_out(model)
    if not _kinds(model):
        for module in list(model.modules()):
            if isinstance(module, Extended):
                restore(module)  # type: ignore[arg-type]


def attached_blocks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of every block that something is attached to."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, AttachedBlock))


def attached_mechanisms(model: nn.Module) -> dict[str, Any]:
    """Every attached mechanism by its name in the model."""
    found = {
        f"{name}.{slot.name}".removeprefix("."): getattr(block, slot.name)
        for name, block in attached_blocks(model)
        for slot in block.interlayer_slots
    }
    shared = {name: module for name, module in model.named_modules() if isinstance(module, (RLA, BranchGate))}
    return found | shared | dict(replaced_layers(model)) | dict(broadcasting_parts(model))


def as_wide_as(model: nn.Module, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with the classifier's widened by the inputs it has from a state, as `model` has them now."""
    widened = own_inputs(model)
    tensors = dict(state_dict)
    if widened is not None:
        classifier, width = widened
        name = next(name for name, p in model.named_parameters() if p is classifier.weight)
        if name in tensors and tensors[name].shape[1:] == (width,):
            extra = classifier.weight.detach()[:, width:].to(tensors[name])
            if len(extra) == len(tensors[name]):
                tensors[name] = torch.cat((tensors[name], extra), 1)
    return tensors
