"""Places recurrent layer aggregation in all residual blocks of a network, and in its head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timm.models.resnet import BasicBlock, Bottleneck
from torch import nn

from ...mechanisms.options import (
    Control,
    Init,
    OptionError,
    Reading,
    expect_flag,
    expect_number,
    expect_positive,
    one_of,
    option,
)
from ...mechanisms.recurrent_cells import GateActivation
from ...mechanisms.rla import PUBLISHED, RLA, VARIANTS, Activation, Cell, Insert, Joins, StagePlan
from ..carried import Carried, Grid, release
from ..extending import Extended, extend, restore
from ..finding import components
from ..finding.calls import record_calls
from ..finding.components import ComponentBlock
from ..finding.probe import AttachError, probe_image
from ..finding.residual_blocks import residual_stages
from .blocks import place_shared

KEY = "rla"  # name of the memory, and of the submodule in the network
CONTROLS = (
    Control(
        {"cross_layer": False}, left="the state starts from zero at every block", tested="the state of other blocks"
    ),
    Control(
        {"exchange": False},
        left="the classifier reads the state, the blocks do not",
        tested="blocks that read the state",
        unless={"variant": "no_exchange"},
        in_classifier=True,
    ),
)


def _expect_variant(name: str, value: Any) -> None:
    if value not in list(VARIANTS):
        raise OptionError(f"unknown variant {value!r} of rla, expected one of {', '.join(VARIANTS)}")


@dataclass(frozen=True, kw_only=True)
class RecurrentStateOptions:
    """Options of recurrent layer aggregation. None selects the value of the variant or the reading."""

    state_channels: int = option(32, "number of channels k of the state", check=expect_positive)
    variant: str = option("v1", f"a row of Tables 6 and 11: {', '.join(VARIANTS)}", check=_expect_variant)
    insert: Insert | None = option(
        None, 'the input of g1: the "branch", the "output" or the "shortcut" of the block',
        check=one_of("branch", "output", "shortcut"), shown="set by the variant",
    )  # fmt: skip
    joins: Joins | None = option(
        None, 'add the result of g1 "before" or "after" the recurrent convolution',
        check=one_of("before", "after"), shown="set by the variant",
    )  # fmt: skip
    cell: Cell | None = option(
        None, 'the recurrent cell: "preact", "postact", "convlstm" or "convgru"',
        check=one_of("preact", "postact", "convlstm", "convgru"), shown="set by the variant",
    )  # fmt: skip
    shared: bool | None = option(
        None, "False gives every block its own g1 and g2", check=expect_flag, shown="set by the variant"
    )
    exchange: bool | None = option(
        None, "False if blocks do not read the state", check=expect_flag, shown="set by the variant"
    )
    cross_layer: bool = option(
        True, "False is a control: the state starts from zero at every block, with the same parameters",
        check=expect_flag,
    )  # fmt: skip
    depthwise: bool | None = option(
        None, "use a depthwise recurrent convolution", check=expect_flag, shown="True in MobileNetV2"
    )
    cell_bias: bool | None = option(
        None, "use biases in the convolutions of an LSTM or GRU cell", check=expect_flag, shown="set by the reading"
    )
    cell_norm: bool = option(True, "False omits norm and tanh on the input of an LSTM or GRU cell", check=expect_flag)
    gate_activation: GateActivation | None = option(
        None, 'the activation of the gates of an LSTM or GRU cell: "hard_sigmoid", as in Keras, or "sigmoid"',
        check=one_of("hard_sigmoid", "sigmoid"), shown="set by the reading",
    )  # fmt: skip
    forget_bias: float | None = option(
        None, "the initial bias of the forget gate of an LSTM cell", check=expect_number, shown="1.0, as in Keras"
    )
    gate_norm: bool | None = option(
        None, "normalize the gates and the candidate of a GRU cell", check=expect_flag, shown="set by the reading"
    )
    head_norm: bool | None = option(None, "normalize the last state", check=expect_flag, shown="set by the reading")
    head_activation: Activation | None = option(
        None, 'the activation after that norm: "tanh", "relu" or "none"', check=one_of("tanh", "relu", "none"),
        shown="set by the reading",
    )  # fmt: skip
    reading: Reading = option(
        "paper",
        '"published" computes what the authors\' program computes (deviations.md)',
        check=one_of("paper", "published"),
    )
    init: Init = option(
        "paper", '"identity" initializes the network to ignore the state', check=one_of("paper", "identity")
    )


def place_recurrent_state(
    model: nn.Module, options: RecurrentStateOptions, *, image_size: int | Grid | None = None
) -> Callable[[], None] | None:
    """Add a recurrent state to the residual blocks of a ResNet, a MobileNetV2 or a pre-activated network."""
    name = type(model).__name__
    calls = record_calls(model, probe_image(model, image_size))
    stages = residual_stages(model, calls, reads_state=True)
    blocks = [block.module for stage in stages for block in stage]
    preactivated = isinstance(blocks[0], ComponentBlock)
    inverted = not preactivated and not isinstance(blocks[0], (BasicBlock, Bottleneck))
    if options.reading == "published" and preactivated:
        raise AttachError(f"the authors published no program for {name}: rla has reading='paper' here")
    if preactivated and options.head_activation == "none":
        raise OptionError(f"head_activation='none' has no effect in {name}, which applies its own ReLU")
    chosen = _resolved(options, inverted, preactivated)
    if chosen["insert"] == "shortcut" and not all(_has_shortcut(block) for block in blocks):
        raise AttachError(f"{name} has blocks without a shortcut: insert='shortcut' has nothing to read there")
    head = _find_head(model, preactivated)
    if head is None and not chosen["exchange"]:
        raise AttachError(f"{name} has no classifier, and with exchange=False nothing else would read the state")
    if head is not None and head.at is not None:
        head_input = next((call.input for call in calls if call.module is head.at), None)
        if head_input is not stages[-1][-1].output:
            raise AttachError(f"{name} runs another module between its last block and the one that reads the state")
    channels = options.state_channels
    rla = RLA(
        [
            StagePlan(
                [components.branch_channels(block.module) for block in stage],
                [components.make_exchange(block.module, channels) for block in stage],
            )
            for stage in stages
        ],
        state_channels=channels,
        head_channels=None if head is None else components.branch_channels(blocks[-1]),
        join=components.conv_like(head.convolution, channels) if head and head.convolution else None,
        reading=options.reading,
        init=options.init,
        **chosen,
    )
    place_shared(model, KEY, rla, stages)
    if head is not None:
        head.join(model, rla, options.init)
    return partial(_reset_zero_branches, blocks) if options.init == "paper" and rla.insert == "branch" else None


def _resolved(options: RecurrentStateOptions, inverted: bool, preactivated: bool) -> dict[str, Any]:
    """Returns the options of `RLA`: defaults, overridden by the reading, the variant and the given options."""
    chosen: dict[str, Any] = {
        "insert": "branch", "joins": "before", "cell": "preact", "shared": True, "exchange": True, "cross_layer": True,
        "depthwise": inverted, "cell_bias": True, "cell_norm": True, "gate_activation": None, "forget_bias": None,
        "gate_norm": False, "head_norm": True,
        "head_activation": "relu" if preactivated else "tanh",
    }  # fmt: skip
    given = {name: value for name in chosen if (value := getattr(options, name)) is not None}
    wanted = {**VARIANTS[options.variant], **given}
    if options.reading == "published":
        chosen |= PUBLISHED["inverted" if inverted else "residual"]
        if not wanted.get("shared", True):
            chosen |= PUBLISHED["unshared"]
        chosen |= PUBLISHED.get(wanted.get("cell", "preact"), {})
    return {**chosen, **wanted}


def detach_head(model: Any) -> None:
    """Undo the changes of `place_recurrent_state` to the head of the network."""
    for module in list(model.modules()):
        if isinstance(module, JoiningHead):
            del module.interlayer_state
            restore(module, JoiningHead)  # type: ignore[arg-type]
    for owner in list(model.modules()):
        rla: Any = owner._modules.get(KEY)
        if not isinstance(rla, RLA):
            continue
        joining = tuple(name for name in owner.__dict__.pop("interlayer_joining", ()) if name != KEY)
        if joining:
            owner.interlayer_joining = joining  # type: ignore[assignment]
        if rla.widens_classifier:
            _set_width(owner, -rla.state_channels, "paper")


class JoiningHead(Extended):
    """A module after the last block that also reads the last state: a norm, or a convolution of both."""

    interlayer_state: tuple[RLA]  # in a tuple, so that it is not registered as a submodule

    def forward(self, x: Any) -> Any:
        (rla,) = self.interlayer_state
        if rla.switched_off:
            output = super().forward(release(x))  # type: ignore[misc]
            return rla.join_zeros(output) if rla.join is None else output
        if not isinstance(x, Carried):
            return super().forward(x)  # type: ignore[misc]
        state = rla.last(x.memories[KEY][0])
        output = super().forward(x.x)  # type: ignore[misc]
        return torch.cat((output, state), 1) if rla.join is None else output + rla.join(state)


@torch.no_grad()
def _reset_zero_branches(blocks: Sequence[Any]) -> None:
    """Set the weight of a branch's last norm to one where timm initializes it to zero (`zero_init_last`).

    The recurrent cell normalizes the projected branch. If the branch is zero, its variance is zero, and each block
    would multiply the gradient of the state by 1 / sqrt(eps).
    """
    for block in blocks:
        if isinstance(block, (BasicBlock, Bottleneck)):
            weight = components.last_norm(block).weight
            if weight is not None and not weight.is_meta and not weight.any():
                weight.fill_(1)


def _has_shortcut(block: Any) -> bool:
    return bool(getattr(block, "has_skip", True))


@dataclass(frozen=True)
class _Head:
    """Where the last state is joined to the last map: after the blocks of a ResNet, or in a module after them.

    Args:
        at: the norm or convolution that reads the output of the last block, or None for `forward_features`.
        convolution: `at`, if it is a convolution of both.
    """

    at: nn.Module | None = None
    convolution: nn.Conv2d | None = None

    def join(self, model: Any, rla: RLA, init: Init) -> None:
        rla.joins_features = self.at is None
        if self.at is None:
            model.interlayer_joining = (*model.interlayer_joining, KEY)
        else:
            self.at.interlayer_state = (rla,)  # type: ignore[assignment]
            extend(self.at, JoiningHead)
        if self.convolution is None:
            _set_width(model, rla.state_channels, init)
            rla.widens_classifier = True


def _find_head(model: Any, preactivated: bool) -> _Head | None:
    if not (hasattr(model, "forward_features") and hasattr(model, "num_features")):
        return None  # a feature extractor: the last state is discarded (section 3.3, guideline 4)
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
    """Add `change` inputs to the classifier, keeping its weights, or remove its last inputs if negative."""
    model.num_features += change
    if hasattr(model, "head_hidden_size"):
        model.head_hidden_size += change
    classifier = model.get_classifier()
    if not isinstance(classifier, nn.Linear):
        return
    kept = classifier.weight[:, : classifier.in_features + min(change, 0)]
    columns = [kept]
    if change > 0:
        added = kept.new_zeros(len(kept), change)
        if init == "paper":
            nn.init.uniform_(added, -(model.num_features**-0.5), model.num_features**-0.5)
        columns.append(added)
    classifier.weight = nn.Parameter(torch.cat(columns, 1), requires_grad=classifier.weight.requires_grad)
    classifier.in_features += change


def backbone_inputs(model: Any) -> tuple[nn.Linear, int] | None:
    """Returns the classifier that also reads a state, and the number of its inputs from the backbone."""
    rla = getattr(model, KEY, None)
    if not isinstance(rla, RLA) or rla.head_channels is None or rla.join is not None:
        return None
    classifier = model.get_classifier()
    return (classifier, rla.head_channels) if isinstance(classifier, nn.Linear) else None
