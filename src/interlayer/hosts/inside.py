"""Placing mechanisms inside the residual blocks of a network: a recurrent state, or a gate on the branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from timm.models.resnet import BasicBlock, Bottleneck
from torch import nn

from ..mechanisms.branch import DIA, BranchAttention, BranchGate, BridgeAttention
from ..mechanisms.description import Init, Reading
from ..mechanisms.rla import RLA, VARIANTS, Activation, Cell, Insert, Joins, StagePlan
from . import residual
from .carry import STATE, JoiningHead, Place, close_blocks, extend, open_block, release_from, restore
from .layout import Grid
from .probe import AttachError, match, probe_image
from .residual import PartedBlock
from .stages import Block, record_calls


def place_rla(
    model: nn.Module,
    *,
    variant: str = "v1",
    state_channels: int = 32,
    insert: Insert | None = None,
    joins: Joins | None = None,
    cell: Cell | None = None,
    shared: bool | None = None,
    exchange: bool | None = None,
    depthwise: bool | None = None,
    cell_bias: bool | None = None,
    cell_norm: bool = True,
    head_norm: bool | None = None,
    head_activation: Activation | None = None,
    reading: Reading = "paper",
    init: Init = "paper",
    image_size: int | Grid | None = None,
) -> Callable[[], None] | None:
    """Let a state run along the residual blocks of `model`; see `RLA` for the options.

    Args:
        model: a network of timm's ResNet or MobileNetV2 blocks, or one of this library's pre-activated ones.
        variant: the integration strategy or cell by the name of the paper's tables, "v1" to "v6", "postact",
            "convlstm", "convgru", "unshared", "no_exchange"; the options below change it.
        depthwise: True in a network of inverted residuals unless given.
        cell_bias: False in the published reading unless given.
        head_norm: False in the published reading of "convlstm" and "convgru" unless given.
        head_activation: "tanh" in the paper's reading, "relu" in pre-activated networks and in the published reading,
            where "convlstm" and "convgru" have "none".
    """
    name = type(model).__name__
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r} of rla, expected one of {', '.join(VARIANTS)}")
    if not isinstance(state_channels, int) or state_channels < 1:
        raise ValueError(f"state_channels must be a whole number of at least 1, got {state_channels!r}")
    calls = record_calls(model, probe_image(model, image_size))
    stages = _residual_stages(model, calls)
    blocks = [block.module for stage in stages for block in stage]
    preactivated = isinstance(blocks[0], PartedBlock)
    inverted = not preactivated and not isinstance(blocks[0], (BasicBlock, Bottleneck))
    published = reading == "published"
    if published and preactivated:
        raise AttachError(f"no program of the paper's authors has {name}: rla has reading='paper' here")

    given = {"insert": insert, "joins": joins, "cell": cell, "shared": shared, "exchange": exchange}
    options: dict[str, Any] = {**VARIANTS[variant], **{key: value for key, value in given.items() if value is not None}}
    shares = options.get("shared", True)
    if published and not inverted and shares and insert is None and "insert" not in options:
        options["insert"] = "output"  # an addition in place has overwritten the branch, but not in the unshared program
    if options.get("insert") == "shortcut" and not all(_has_shortcut(block) for block in blocks):
        raise AttachError(f"{name} has blocks without a shortcut: insert='shortcut' has nothing to read there")
    gated = options.get("cell") in ("convlstm", "convgru")
    activation: Activation = "relu" if published or preactivated else "tanh"
    if published and gated:
        activation = "none"
    if preactivated and head_activation == "none":
        raise ValueError(f"head_activation='none' means nothing in {name}, whose own ReLU follows")
    head = _find_head(model, preactivated)
    if head is not None and head.at is not None:
        entered = next((call.input for call in calls if call.module is head.at), None)
        if entered is not stages[-1][-1].output:
            raise AttachError(f"something lies between the last block of {name} and what would read the last state")
    rla = RLA(
        [
            StagePlan(
                [residual.branch_channels(block.module) for block in stage],
                [residual.make_exchange(block.module, state_channels) for block in stage],
            )
            for stage in stages
        ],
        state_channels=state_channels,
        depthwise=inverted if depthwise is None else depthwise,
        cell_bias=not published if cell_bias is None else cell_bias,
        cell_norm=cell_norm,
        one_recurrence=published and inverted,
        head_channels=None if head is None else residual.branch_channels(blocks[-1]),
        join=residual.conv_like(head.convolution, state_channels) if head and head.convolution else None,
        head_norm=not (published and gated) if head_norm is None else head_norm,
        head_activation=head_activation or activation,
        reading=reading,
        init=init,
        **options,
    )
    match(rla, model)
    model.add_module(STATE, rla)
    for number, stage in enumerate(stages):
        for index, block in enumerate(stage):
            open_block(block.module).interlayer_state = Place(rla, number, index)
    if head is not None:
        head.join(model, rla, init)
    release_from(model, [block.name for stage in stages for block in stage])
    return partial(_wake_branches, blocks) if init == "paper" and rla.insert == "branch" else None


def has_rla(model: nn.Module) -> bool:
    return hasattr(model, STATE)


def take_out_rla(model: Any) -> None:
    """Undo `place_rla`."""
    rla = model._modules.pop(STATE)
    for module in model.modules():
        if isinstance(module, JoiningHead):
            del module.interlayer_state
            restore(module)  # type: ignore[arg-type]
    if rla.head_channels is not None and rla.join is None:
        _set_width(model, -rla.state_channels, "paper")
    close_blocks(model, "interlayer_state")


def place_gates(model: nn.Module, *, kind: str, image_size: int | Grid | None = None) -> None:
    """Put attention on the branch of every residual block: one of timm's layers, "dia" or "bridge"."""
    name = f"{kind}_gate"  # of its module, in each block or, where blocks share it, in the network
    stages = _residual_stages(model, record_calls(model, probe_image(model, image_size)))
    blocks = [block for stage in stages for block in stage]
    if kind == "bridge" and not all(residual.tap_channels(block.module) for block in blocks):
        raise AttachError(
            f"bridge attention joins the convolutions of a ResNet's block, {type(model).__name__} has none"
        )
    if kind == "dia":
        shared = DIA([residual.branch_channels(stage[0].module) for stage in stages])
        if any(len({residual.branch_channels(block.module) for block in stage}) > 1 for stage in stages):
            raise AttachError(f"{type(model).__name__} has stages of several widths: dia shares one LSTM of one width")
        match(shared, model)
        model.add_module(name, shared)
    for number, stage in enumerate(stages):
        for index, block in enumerate(stage):
            holder: BranchGate
            if kind == "dia":
                holder = shared
            else:
                channels = residual.branch_channels(block.module)
                taps = residual.tap_channels(block.module)
                holder = BridgeAttention(channels, taps) if kind == "bridge" else BranchAttention(channels, kind=kind)
                match(holder, block.module)
                block.module.add_module(name, holder)
            open_block(block.module).interlayer_gate = Place(holder, number, index)
    release_from(model, [block.name for block in blocks])


def has_gates(model: nn.Module) -> bool:
    return any(isinstance(module, BranchGate) for module in model.modules())


def take_out_gates(model: nn.Module) -> None:
    """Undo `place_gates`."""
    for module in model.modules():
        for name in [name for name, child in module._modules.items() if isinstance(child, BranchGate)]:
            del module._modules[name]
    close_blocks(model, "interlayer_gate")


@torch.no_grad()
def _wake_branches(blocks: Sequence[Any]) -> None:
    """Give branches that timm starts at zero (`zero_init_last`) the usual start.

    The state normalises what the branch hands it. A branch that is zero everywhere has no spread to normalise by, and
    each block would multiply the state's gradient by 1 / sqrt(eps).
    """
    for block in blocks:
        if isinstance(block, (BasicBlock, Bottleneck)):
            weight = residual.last_norm(block).weight
            if weight is not None and not weight.is_meta and not weight.any():
                weight.fill_(1)


def _has_shortcut(block: Any) -> bool:
    return bool(getattr(block, "has_skip", True))


def _residual_stages(model: nn.Module, calls: list[Block]) -> list[list[Block]]:
    """The residual blocks of a network that runs nothing but those between its stem and its head, by stages.

    A stage of a ResNet is what its author named one; elsewhere it is the blocks whose branches are of one resolution.
    """
    name = type(model).__name__
    blocks = [call for call in calls if residual.objection(call.module) is None]
    if not blocks:
        reasons = [why for call in calls if (why := _why_not(call.module))]
        raise AttachError(
            f"{name} has no residual blocks that a mechanism can enter: "
            + (reasons[0] if reasons else "they are neither timm's ResNet blocks nor its MobileNetV2 blocks")
        )
    for call in calls:
        if why := _why_not(call.module):
            raise AttachError(f"{name} has a block that a mechanism cannot enter, {call.name}: {why}")
    for before, block in pairwise(blocks):
        if block.input is not before.output:
            raise AttachError(
                f"{name} runs something between {before.name} and {block.name}, so nothing can be handed on from one "
                f"to the other"
            )
    stages: list[list[Block]] = []
    keys: list[Any] = []
    for block in blocks:
        named = isinstance(block.module, (BasicBlock, Bottleneck))
        last = block.input if getattr(block.module, "pools_last", False) else block.output
        key = block.name.rpartition(".")[0] if named else tuple(last.shape[2:])  # type: ignore[union-attr]
        if not keys or keys[-1] != key:
            stages.append([])
            keys.append(key)
        stages[-1].append(block)
    return stages


def _why_not(module: nn.Module) -> str | None:
    """What speaks against a block that looks like a residual one."""
    of_efficientnet = type(module).__module__.endswith("._efficientnet_blocks") and hasattr(module, "feature_info")
    looks = of_efficientnet or isinstance(module, (BasicBlock, Bottleneck, PartedBlock))
    return residual.objection(module) if looks else None


@dataclass(frozen=True)
class _Head:
    """Where the last state meets the last map: behind the blocks of a ResNet, or at a module behind them.

    Args:
        at: the norm or convolution that reads the last block's output; None for the network's own forward_features.
        convolution: `at`, where it is a convolution of both.
    """

    at: nn.Module | None = None
    convolution: nn.Conv2d | None = None

    def join(self, model: Any, rla: RLA, init: Init) -> None:
        rla.joins_features = self.at is None
        if self.at is not None:
            self.at.interlayer_state = Place(rla, 0, 0)  # type: ignore[assignment]
            extend(self.at, JoiningHead)
        if self.convolution is None:
            _set_width(model, rla.state_channels, init)


def _find_head(model: Any, preactivated: bool) -> _Head | None:
    if not (hasattr(model, "forward_features") and hasattr(model, "num_features")):
        return None  # a network of features: the last state is discarded (section 3.3, guideline 4)
    if isinstance(getattr(model, "conv_head", None), nn.Conv2d):
        return _Head(model.conv_head, model.conv_head)
    classifier = model.get_classifier()
    if not isinstance(classifier, (nn.Linear, nn.Identity)):
        raise AttachError(
            f"the classifier of {type(model).__name__} is a {type(classifier).__name__}, expected a linear layer, "
            f"which can be widened by the state's channels"
        )
    if getattr(model.global_pool, "feat_mult", lambda: 1)() != 1:
        raise AttachError(
            f"the pooling of {type(model).__name__} gives several values for each channel, so its classifier cannot be "
            f"widened; build the network with global_pool='avg'"
        )
    return _Head(model.norm) if preactivated else _Head()


@torch.no_grad()
def _set_width(model: Any, change: int, init: Init) -> None:
    """Give the classifier so many inputs more, keeping what it has learnt, or take the last ones away again."""
    model.num_features += change
    if hasattr(model, "head_hidden_size"):
        model.head_hidden_size += change
    classifier = model.get_classifier()
    if not isinstance(classifier, nn.Linear):
        return
    kept = classifier.weight[:, : classifier.in_features + min(change, 0)]
    parts = [kept]
    if change > 0:
        columns = kept.new_zeros(len(kept), change)
        if init == "paper":
            nn.init.uniform_(columns, -(model.num_features**-0.5), model.num_features**-0.5)
        parts.append(columns)
    classifier.weight = nn.Parameter(torch.cat(parts, 1), requires_grad=classifier.weight.requires_grad)
    classifier.in_features += change


def own_inputs(model: Any) -> tuple[nn.Linear, int] | None:
    """The classifier that also reads a state, and how many of its inputs are the backbone's."""
    rla = getattr(model, STATE, None)
    if rla is None or rla.head_channels is None or rla.join is not None:
        return None
    classifier = model.get_classifier()
    return (classifier, rla.head_channels) if isinstance(classifier, nn.Linear) else None
