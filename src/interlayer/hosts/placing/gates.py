"""Places attention on the branch of every residual block, before the shortcut is added."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ...mechanisms.gates import DIA, BranchAttention, BranchGate, BridgeAttention
from ...mechanisms.options import Init, one_of, option
from ...mechanisms.protocol import Place
from ..block import add_entry
from ..carried import Grid, release_from
from ..finding import components
from ..finding.calls import record_calls
from ..finding.probe import AttachError, match, probe_image
from ..finding.residual_blocks import residual_stages
from .blocks import place_shared

GATES = ("se", "eca", "cbam", "gc", "nl", "dia", "bridge")


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """Options of attention on the branch."""

    init: Init = option(
        "paper",
        '"identity" starts gates at one and additions at zero, which preserves the function of the network',
        check=one_of("paper", "identity"),
    )


def gate_key(kind: str) -> str:
    """Returns the name of a gate's submodule in each block or, if it is shared, in the network."""
    return f"{kind}_gate"


def place_gates(model: nn.Module, options: GateOptions, *, kind: str, image_size: int | Grid | None = None) -> None:
    """Add attention to the branch of every residual block: one of timm's layers, "dia" or "bridge"."""
    key = gate_key(kind)
    stages = residual_stages(model, record_calls(model, probe_image(model, image_size)))
    name = type(model).__name__
    if kind == "dia":
        for stage in stages:
            found = dict.fromkeys(components.branch_channels(block.module) for block in stage)
            if len(found) > 1:
                raise AttachError(
                    f"{name} has stages of several widths: dia shares one LSTM of one width, and the blocks "
                    f"{stage[0].name} to {stage[-1].name} have {' and '.join(map(str, found))} channels"
                )
        widths = [components.branch_channels(stage[0].module) for stage in stages]
        place_shared(model, key, DIA(widths, init=options.init), stages)
        return
    if kind == "bridge" and not all(components.inner_channels(block.module) for stage in stages for block in stage):
        raise AttachError(f"bridge attention joins the convolutions of a ResNet's block, {name} has other blocks")
    for number, stage in enumerate(stages):
        for index, block in enumerate(stage):
            channels = components.branch_channels(block.module)
            gate: BranchGate
            if kind == "bridge":
                gate = BridgeAttention(channels, components.inner_channels(block.module), init=options.init)
            else:
                gate = BranchAttention(channels, kind=kind, init=options.init)
            match(gate, block.module)
            add_entry(block.module, key, gate, Place(number, index, len(stage)))
    release_from(model, [block.name for stage in stages for block in stage])
