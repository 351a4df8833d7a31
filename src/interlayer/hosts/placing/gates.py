"""Places attention on the branch of every residual block, before the shortcut is added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...mechanisms.gates import DIA, BranchAttention, BranchGate, BridgeAttention
from ...mechanisms.options import Init, OptionError, expect_odd, one_of, option
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


def _expect_kernel_sizes(name: str, value: Any) -> None:
    for size in value.values() if isinstance(value, Mapping) else [value]:
        expect_odd(name, size)


@dataclass(frozen=True, kw_only=True)
class EcaOptions(GateOptions):
    """Options of efficient channel attention."""

    kernel_size: int | Mapping[int, int] | None = option(
        None,
        "the kernel size of the convolution, an odd number, or one for each width of a branch such as {64: 1, 96: 3}",
        check=_expect_kernel_sizes,
        shown="derived from the channels",
    )

    def kernel_size_of(self, channels: int) -> int | None:
        """Returns the kernel size for a branch of `channels` channels, or None to derive it."""
        if not isinstance(self.kernel_size, Mapping):
            return self.kernel_size
        if channels not in self.kernel_size:
            raise OptionError(f"kernel_size names no size for branches of {channels} channels: add {channels} to it")
        return self.kernel_size[channels]


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
                size = options.kernel_size_of(channels) if isinstance(options, EcaOptions) else None
                gate = BranchAttention(channels, kind=kind, init=options.init, kernel_size=size)
            match(gate, block.module)
            add_entry(block.module, key, gate, Place(number, index, len(stage)))
    release_from(model, [block.name for stage in stages for block in stage])
