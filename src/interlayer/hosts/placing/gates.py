"""Places attention on the branch of residual blocks, before the shortcut is added, and SE on MLPs of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ...mechanisms.bridge import BridgeAttention
from ...mechanisms.dia import DIA, DIA_REDUCTION
from ...mechanisms.double_attention import DOUBLE_REDUCTION, DoubleAttention
from ...mechanisms.gates import NL_REDUCTION, REDUCTION, BranchAttention, BranchGate, Fuse, TokenSE
from ...mechanisms.options import (
    Control,
    Init,
    OptionError,
    expect_flag,
    expect_odd,
    expect_positive,
    expect_rate,
    one_of,
    option,
    values_of,
)
from ...mechanisms.protocol import Place
from ..block import add_entry
from ..carried import Grid, release_from
from ..finding import components
from ..finding.blocks import find_chains
from ..finding.calls import Call, record_calls
from ..finding.probe import AttachError, match, probe_image
from ..finding.residual_blocks import residual_stages
from .blocks import are_block_numbers, check_block_numbers, place_shared
from .broadcast import component_of, token_widths

GATES = ("se", "eca", "cbam", "gc", "nl", "a2", "dia", "bridge")
Blocks = Literal["all", "later", "upper", "alternate", "one"] | Sequence[int]
BLOCKS = ("all", "later", "upper", "alternate", "one")
DIA_CONTROLS = (
    Control(
        {"cross_layer": False}, left="the LSTM starts from zero at every block", tested="the state of other blocks"
    ),
)


def _expect_blocks(name: str, value: Any) -> None:
    if value not in BLOCKS and not are_block_numbers(value):
        raise OptionError(
            f"{name} must be {' or '.join(map(repr, BLOCKS))}, or numbers of blocks from 0 such as [11, 12], got "
            f"{value!r}"
        )


def _blocks(default: Blocks) -> Any:
    return option(
        default,
        '"all" blocks, those of the "later" stages (without the first), the "upper" half, "alternate" (every other '
        'block of the stages between the first and the last), "one" (the last but one of the stage before the last), '
        "or numbers of blocks from 0 through all stages, such as [11, 12]",
        check=_expect_blocks,
    )


def _reduction(default: int) -> Any:
    return option(default, "channels divided by those of the hidden layer", check=expect_positive)


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """Options of every gate."""

    init: Init = option(
        "paper",
        '"identity" starts gates at one and additions at zero, which preserves the function of the network',
        check=one_of("paper", "identity"),
    )
    drop_path: float = option(
        0.0,
        "stochastic depth rate of the gate alone: the gate is one, or the addition zero, where a sample is dropped",
        check=expect_rate,
    )


@dataclass(frozen=True, kw_only=True)
class GateOptions(StartOptions):
    """Options of attention on the branch of each block."""

    blocks: Blocks = _blocks("all")


@dataclass(frozen=True, kw_only=True)
class ReducedGateOptions(GateOptions):
    """Options of a gate with a hidden layer."""

    reduction: int = _reduction(REDUCTION)


@dataclass(frozen=True, kw_only=True)
class GlobalContextOptions(ReducedGateOptions):
    """Options of global context."""

    fuse: Fuse = option(
        "add", '"add" the context to the branch, or "scale" the branch by its sigmoid', check=one_of("add", "scale")
    )


@dataclass(frozen=True, kw_only=True)
class NonLocalOptions(GateOptions):
    """Options of non-local blocks."""

    blocks: Blocks = _blocks("one")
    reduction: int = _reduction(NL_REDUCTION)


@dataclass(frozen=True, kw_only=True)
class DoubleAttentionOptions(GateOptions):
    """Options of double attention."""

    blocks: Blocks = _blocks("alternate")
    reduction: int = _reduction(DOUBLE_REDUCTION)


@dataclass(frozen=True, kw_only=True)
class SharedGateOptions(StartOptions):
    """Options of DIA, which all blocks of a stage share."""

    reduction: int = _reduction(DIA_REDUCTION)
    cross_layer: bool = option(
        True, "False is a control: the LSTM starts from zero at every block, with the same parameters",
        check=expect_flag,
    )  # fmt: skip


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
    """Add attention to the branch of residual blocks: one of timm's layers, "a2" or "bridge".

    SE is added to the MLPs of a network without residual blocks, such as a transformer.
    """
    key, name = gate_key(kind), type(model).__name__
    try:
        stages = residual_stages(model, record_calls(model, probe_image(model, image_size)))
    except AttachError as error:
        if kind != "se":
            raise
        if not _place_on_tokens(model, options, key, image_size):
            raise AttachError(f"{error}; nor has each of its blocks an MLP of tokens") from None
        return
    if kind == "bridge" and not all(components.inner_channels(block.module) for stage in stages for block in stage):
        raise AttachError(f"bridge attention joins the convolutions of a ResNet's block, {name} has other blocks")
    chosen = _chosen(stages, options.blocks, name)
    given = values_of(options, without=("blocks",))
    for number, stage in enumerate(stages):
        for index, block in enumerate(stage):
            if block not in chosen:
                continue
            channels = components.branch_channels(block.module)
            gate: BranchGate
            if kind == "bridge":
                gate = BridgeAttention(channels, components.inner_channels(block.module), **given)
            elif kind == "a2":
                gate = DoubleAttention(channels, **given)
            else:
                if isinstance(options, EcaOptions):
                    given["kernel_size"] = options.kernel_size_of(channels)
                gate = BranchAttention(channels, kind=kind, **given)
            match(gate, block.module)
            add_entry(block.module, key, gate, Place(number, index, len(stage)))
    release_from(model, [block.name for block in chosen])


def _chosen(stages: Sequence[Sequence[Call]], blocks: Blocks, name: str) -> list[Call]:
    """Returns the blocks that the option `blocks` names."""
    found = [block for stage in stages for block in stage]
    if blocks == "one":
        stage = stages[-2] if len(stages) > 1 else stages[0]
        return [stage[max(0, len(stage) - 2)]]
    if blocks == "later":
        return [block for stage in (stages[1:] or stages) for block in stage]
    if blocks == "alternate":
        between = stages[1:-1] if len(stages) > 2 else stages
        return [block for stage in between for block in (stage[1::2] or stage)]
    return _numbered(found, blocks, name)


def _numbered(found: list[Call], blocks: Blocks, name: str) -> list[Call]:
    """Returns all blocks, the upper half, or the blocks with these numbers."""
    if blocks == "all":
        return found
    if blocks == "upper":
        return found[len(found) // 2 :]
    if isinstance(blocks, str):
        raise AttachError(f"{name} has no stages, which blocks={blocks!r} counts: give 'all', 'upper' or numbers")
    check_block_numbers("blocks", blocks, len(found), name)
    return [found[number] for number in sorted(set(blocks))]


def _place_on_tokens(model: nn.Module, options: GateOptions, key: str, image_size: int | Grid | None) -> bool:
    """Add SE at the end of the MLPs of a transformer or mixer. Returns False for another network."""
    name = type(model).__name__
    try:
        found = [block for chain in find_chains(model, image_size) for block in chain]
        mlps = {block.name: component_of(block, "end", name) for block in found}
        widths = token_widths(model, [(mlp, "end") for mlp in mlps.values()], name, image_size)
    except AttachError:
        return False
    chosen = _numbered(found, options.blocks, name)
    for number, block in enumerate(chosen):
        mlp = mlps[block.name]
        gate = TokenSE(widths[mlp], **values_of(options, without=("blocks",)))
        match(gate, mlp)
        add_entry(mlp, key, gate, Place(0, number, len(chosen)))
    release_from(model, [block.name for block in chosen])
    return bool(chosen)


def place_dia(model: nn.Module, options: SharedGateOptions, *, image_size: int | Grid | None = None) -> None:
    """Add the attention of DIANet, one LSTM per stage, to the branch of every residual block."""
    stages = residual_stages(model, record_calls(model, probe_image(model, image_size)))
    name = type(model).__name__
    for stage in stages:
        found = dict.fromkeys(components.branch_channels(block.module) for block in stage)
        if len(found) > 1:
            raise AttachError(
                f"{name} has stages of several widths: dia shares one LSTM of one width, and the blocks "
                f"{stage[0].name} to {stage[-1].name} have {' and '.join(map(str, found))} channels"
            )
    widths = [components.branch_channels(stage[0].module) for stage in stages]
    place_shared(model, gate_key("dia"), DIA(widths, **values_of(options)), stages)
