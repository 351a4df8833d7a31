"""Attaches mechanisms to networks, and removes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..mechanisms import MLA, MRLABase, MRLALight, MRLALinear
from ..mechanisms.options import Control, OptionDescription, OptionError, describe, parse, unknown
from .block import AttachedBlock, remove_entries
from .carried import AttachedModel, Grid
from .extending import restore
from .finding.probe import AttachError, checked_size, reason, run_once
from .placing import gates
from .placing import layer_attention as layers
from .placing import recurrent_state as recurrence
from .placing.augmented import (
    AugmentedOptions,
    augmented_convolutions,
    place_augmented_convolutions,
    take_out_augmented_convolutions,
)
from .placing.blocks import carry_grid, grid_carriers, let_grid_travel, map_readers, stop_grid
from .placing.broadcast import (
    ContextBroadcastOptions,
    broadcasts,
    place_context_broadcast,
    take_out_broadcasts,
)
from .placing.local_attention import (
    LocalAttentionOptions,
    local_attentions,
    place_local_attention,
    take_out_local_attention,
)
from .placing.replaced import replaced_layers


@dataclass(frozen=True)
class Kind:
    """A kind of mechanisms. A network has at most one mechanism of each kind.

    Args:
        name: the name of the kind, for messages.
        present: returns whether a network has a mechanism of this kind.
        take_out: removes the mechanism of this kind from a network.
    """

    name: str
    present: Callable[[nn.Module], object]
    take_out: Callable[[nn.Module], None]


def kind_in_blocks(name: str, *keys: str, undo: Callable[[nn.Module], None] | None = None) -> Kind:
    """Returns a kind of mechanisms that implement `BlockMechanism`.

    Args:
        name: the name of the kind, for messages.
        keys: the keys of its entries in blocks and, for shared mechanisms, of its submodules in the network.
        undo: a function that undoes further changes of the network. It is called before the mechanism is removed.
    """

    def present(model: nn.Module) -> bool:
        return any(entry.key in keys for _, block in attached_blocks(model) for entry in block.interlayer_entries)

    def take_out(model: nn.Module) -> None:
        if undo is not None:
            undo(model)
        entries = [entry for _, block in attached_blocks(model) for entry in block.interlayer_entries]
        shared = [entry.shared for entry in entries if entry.key in keys and entry.shared is not None]
        remove_entries(model, keys)
        for owner in list(model.modules()):
            for key in keys:
                if any(owner._modules.get(key) is mechanism for mechanism in shared):
                    del owner._modules[key]

    return Kind(name, present, take_out)


@dataclass(frozen=True)
class Mechanism:
    """A row of the table of mechanisms.

    Args:
        kind: the kind of the mechanism.
        options: the dataclass of its options.
        place: puts the mechanism into a network: `place(model, options, image_size=...)`. If it returns a function,
            that function is called after the network has run once with the mechanism.
        about: a description in one line.
        controls: the mechanism without what it is credited with, the mildest control first. Empty if only the plain
            network tells what the mechanism contributes.
    """

    kind: Kind
    options: type
    place: Callable[..., Callable[[], None] | None]
    about: str = ""
    controls: tuple[Control, ...] = ()


LAYER_ATTENTION = kind_in_blocks("layer attention", layers.KEY)
RECURRENT_STATE = kind_in_blocks("recurrent layer aggregation", recurrence.KEY, undo=recurrence.detach_head)
BRANCH_ATTENTION = kind_in_blocks("attention on the branch", *map(gates.gate_key, gates.GATES))
LOCAL_ATTENTION = Kind("local attention", local_attentions, take_out_local_attention)
AUGMENTED = Kind("augmented convolutions", augmented_convolutions, take_out_augmented_convolutions)
BROADCAST = Kind("context broadcasting", broadcasts, take_out_broadcasts)


def _layer_attention(
    name: str, make: type, options: type, about: str, channels_per_head: int | None = None
) -> Mechanism:
    place = partial(layers.place_layer_attention, make=make, mechanism=name, fixed_channels_per_head=channels_per_head)
    controls = layers.LIGHT_CONTROLS if make is MRLALight else (layers.SELF_ALONE,)
    return Mechanism(LAYER_ATTENTION, options, place, about, controls)


def _gate(name: str, about: str, options: type = gates.ReducedGateOptions) -> Mechanism:
    return Mechanism(BRANCH_ATTENTION, options, partial(gates.place_gates, kind=name), about)


MECHANISMS: dict[str, Mechanism] = {
    "mrla_light": _layer_attention(
        "mrla_light", MRLALight, layers.LightOptions,
        "a gate on the layer's own value plus lambda times the output of the previous layer (MRLA, Eq. 8)",
    ),
    "mrla_base": _layer_attention(
        "mrla_base", MRLABase, layers.BaseOptions,
        "softmax attention over all layers of the stage so far (MRLA, Eq. 6)",
    ),
    "mla": _layer_attention(
        "mla", MLA, layers.LayerAttentionOptions,
        "mrla_base, but every layer derives all keys and values itself (MRLA, Eq. 4)",
    ),
    "mrla_linear": _layer_attention(
        "mrla_linear", MRLALinear, layers.LinearOptions, "mrla_base with the kernel elu + 1 (MRLA, appendix A.3)"
    ),
    "crla": _layer_attention(
        "crla", MRLALight, layers.LightOptions, "mrla_light with one channel per head (MRLA, Table 4 f)",
        channels_per_head=1,
    ),
    "rla": Mechanism(
        RECURRENT_STATE, recurrence.RecurrentStateOptions, recurrence.place_recurrent_state,
        "a recurrent state of k channels that every residual block reads and updates (RLA, section 3.3)",
        recurrence.CONTROLS,
    ),
    "halo": Mechanism(
        LOCAL_ATTENTION, LocalAttentionOptions, place_local_attention,
        "blocked local attention in place of 3x3 convolutions (HaloNet, sections 4.5, 4.6)",
    ),
    "cb": Mechanism(
        BROADCAST, ContextBroadcastOptions, place_context_broadcast,
        "context broadcasting: the average of every token and the mean token (CB, sections 3.2, 3.3)",
    ),
    "se": _gate("se", "squeeze-and-excitation on the branch of residual blocks, or on the MLPs of a transformer"),
    "eca": _gate("eca", "efficient channel attention on the branch", gates.EcaOptions),
    "cbam": _gate("cbam", "channel and spatial attention on the branch"),
    "gc": _gate("gc", "global context added to the branch (GCNet)", gates.GlobalContextOptions),
    "nl": _gate("nl", "a non-local block on the branch", gates.NonLocalOptions),
    "a2": _gate("a2", "double attention on the branch (A²-Net)", gates.DoubleAttentionOptions),
    "dia": Mechanism(
        BRANCH_ATTENTION, gates.SharedGateOptions, gates.place_dia,
        "one LSTM per stage computes the scale of each branch (DIANet)", gates.DIA_CONTROLS,
    ),
    "bridge": _gate("bridge", "the scale of each branch is computed from all convolutions of its block (BA-Net)"),
    "aa": Mechanism(
        AUGMENTED, AugmentedOptions, place_augmented_convolutions,
        "some channels of 3x3 convolutions are computed by self-attention over the map (AA-Net)",
    ),
}  # fmt: skip


def register_mechanism(name: str, mechanism: Mechanism) -> None:
    """Register a mechanism under a new name, so that `attach` accepts it."""
    if name in MECHANISMS:
        raise ValueError(f"there is already a mechanism {name!r}: choose another name")
    MECHANISMS[name] = mechanism


def attach(model: nn.Module, mechanism: str, *, image_size: int | Grid | None = None, **options: Any) -> nn.Module:
    """Attach a mechanism to `model`, in place, and return the model.

    The parameters of the network keep their names. The parameters of layer attention are added as `<block>.mrla.*`,
    those of recurrent layer aggregation as `rla.*`, those of attention on the branch as `<block>.eca_gate.*`. Several
    mechanisms of different kinds can be attached to the same network.

    Args:
        model: a timm model, with or without `features_only`, or any network of blocks in stages.
        mechanism: the name of the mechanism. Layer attention after the blocks: "mrla_light", "mrla_base", "mla",
            "mrla_linear" or "crla". A recurrent state inside residual blocks: "rla". Attention on the branch of
            residual blocks, for comparison: "se", "eca", "cbam", "gc", "nl", "a2", "dia" (one LSTM per stage) or
            "bridge". Local attention in place of 3x3 convolutions: "halo", or in some of their channels: "aa". Context
            broadcasting in transformers: "cb".
        image_size: size of the image with which the stages are found, if the model does not define it.
        options: options of the mechanism. Most have `init="identity"`, which preserves the function of the network for
            fine-tuning. Layer attention and "rla" also have `reading="published"`, which computes what the
            authors' program computes. `interlayer mechanisms NAME` and docs/options.md list all options.

    Raises:
        AttachError: the mechanism cannot be attached to this network. The model is left unchanged.

    >>> model = timm.create_model("resnet50", pretrained=True)
    >>> model = interlayer.attach(model, "mrla_light", init="identity")
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach expects a torch.nn.Module, got {type(model).__name__}")
    row = _row(mechanism)
    if image_size is not None:
        checked_size(image_size)
    record: Any = parse(row.options, mechanism, options)
    present = _kinds(model)
    if row.kind in present:
        raise AttachError(f"{type(model).__name__} already has {row.kind.name}: detach it first")
    carriers, readers = grid_carriers(model), map_readers(model)
    try:
        finish = row.place(model, record, image_size=image_size)
        carry_grid(carriers)  # a block with its first mechanism now passes the grid on by itself
        if map_readers(model) != readers:
            let_grid_travel(model, image_size)
        run_once(model, image_size)
        if finish is not None:
            finish()
    except Exception as error:
        placed = [kind for kind in _kinds(model) if kind not in present]
        _take_out(model, placed)
        stop_grid(model)
        carry_grid(carriers)
        if not placed:
            raise  # nothing was placed: the error gives the reason
        raise AttachError(
            f"{type(model).__name__} does not run with {mechanism} in its blocks and was left as it was: "
            f"{reason(error)}"
        ) from error
    return model


def detach(model: nn.Module) -> nn.Module:
    """Remove all mechanisms from `model`, in place, and return the network with its current weights."""
    if not _kinds(model):
        raise ValueError(f"{type(model).__name__} has nothing attached")
    _take_out(model, _kinds(model))
    return model


def _row(mechanism: str) -> Mechanism:
    if mechanism not in list(MECHANISMS):
        raise ValueError(unknown("mechanism", mechanism, MECHANISMS))
    return MECHANISMS[mechanism]


def options_of(mechanism: str) -> dict[str, OptionDescription]:
    """Returns the options of a mechanism by name, with their defaults and meaning."""
    return {entry.name: entry for entry in describe(_row(mechanism).options)}


def controls_of(mechanism: str, options: Mapping[str, Any] | None = None) -> list[Control]:
    """Returns the controls of a mechanism with these options, the mildest first.

    The list is empty if the plain network is the only control.
    """
    given = options or {}
    return [control for control in _row(mechanism).controls if control.options_for(given) is not None]


def accepts_option(mechanism: str, name: str, value: Any) -> bool:
    """Returns whether a mechanism has an option of this name that takes this value."""
    try:
        parse(_row(mechanism).options, mechanism, {name: value})
    except OptionError:
        return False
    return True


def _kinds(model: nn.Module) -> list[Kind]:
    """Returns the kinds of mechanisms in a network."""
    return [kind for kind in dict.fromkeys(row.kind for row in MECHANISMS.values()) if kind.present(model)]


def _take_out(model: nn.Module, kinds: Sequence[Kind]) -> None:
    for kind in kinds:
        kind.take_out(model)
    if not _kinds(model):
        stop_grid(model)
        for module in list(model.modules()):
            if isinstance(module, AttachedModel):
                restore(module, AttachedModel)  # type: ignore[arg-type]


def attached_blocks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields name and module of every block, or component of a block, with an attached mechanism."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, AttachedBlock))


def attached_mechanisms(model: nn.Module) -> dict[str, Any]:
    """Returns every attached mechanism by its name in the model."""
    names = {module: name for name, module in model.named_modules()}
    modules = [entry.mechanism_in(block) for _, block in attached_blocks(model) for entry in block.interlayer_entries]
    found: dict[str, Any] = {names[module]: module for module in modules if module in names}
    return found | dict(replaced_layers(model)) | dict(broadcasts(model))


def as_wide_as(model: nn.Module, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights with the classifier's weight widened by the columns in `model` that read a state."""
    widened = recurrence.backbone_inputs(model)
    tensors = dict(state_dict)
    if widened is not None:
        classifier, width = widened
        name = next(name for name, p in model.named_parameters() if p is classifier.weight)
        if name in tensors and tensors[name].shape[1:] == (width,):
            extra = classifier.weight.detach()[:, width:].to(tensors[name])
            if len(extra) == len(tensors[name]):
                tensors[name] = torch.cat((tensors[name], extra), 1)
    return tensors
