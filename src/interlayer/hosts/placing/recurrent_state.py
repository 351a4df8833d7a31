"""Where a recurrent state goes: along all residual blocks of a network, and into its head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timm.models.resnet import BasicBlock, Bottleneck
from torch import nn

from ...mechanisms.options import Init, OptionError, Reading, expect_flag, expect_positive, one_of, option
from ...mechanisms.rla import PUBLISHED, RLA, VARIANTS, Activation, Cell, Insert, Joins, StagePlan
from ..carried import Carried, Grid
from ..extending import Extended, extend, restore
from ..finding import residual
from ..finding.calls import record_calls
from ..finding.probe import AttachError, probe_image
from ..finding.residual import ComponentBlock
from ..finding.residual_stages import residual_stages
from .blocks import place_shared

KEY = "rla"  # the name of the state among what is carried, and of its module in a network


def _expect_variant(name: str, value: Any) -> None:
    if value not in list(VARIANTS):
        raise OptionError(f"unknown variant {value!r} of rla, expected one of {', '.join(VARIANTS)}")


@dataclass(frozen=True, kw_only=True)
class RecurrentStateOptions:
    """Options of recurrent layer aggregation. None stands for the variant's or the reading's value."""

    state_channels: int = option(32, "channels k of the state", check=expect_positive)
    variant: str = option("v1", f"a row of Tables 6 and 11: {', '.join(VARIANTS)}", check=_expect_variant)
    insert: Insert | None = option(
        None, 'what g1 reads: the "branch", the "output" or the "shortcut"',
        check=one_of("branch", "output", "shortcut"), shown="the variant's",
    )  # fmt: skip
    joins: Joins | None = option(
        None, 'whether g1\'s result is added "before" or "after" the recurrent convolution',
        check=one_of("before", "after"), shown="the variant's",
    )  # fmt: skip
    cell: Cell | None = option(
        None, '"preact", "postact", "convlstm" or "convgru"',
        check=one_of("preact", "postact", "convlstm", "convgru"), shown="the variant's",
    )  # fmt: skip
    shared: bool | None = option(
        None, "False gives every block a g1 and a g2 of its own", check=expect_flag, shown="the variant's"
    )
    exchange: bool | None = option(
        None, "False for blocks that do not read the state", check=expect_flag, shown="the variant's"
    )
    depthwise: bool | None = option(
        None, "a depthwise recurrent convolution", check=expect_flag, shown="True in MobileNetV2"
    )
    cell_bias: bool | None = option(
        None, "biases in the convolutions of an LSTM or GRU cell", check=expect_flag, shown="the reading's"
    )
    cell_norm: bool = option(True, "False leaves the input of an LSTM or GRU cell as it is", check=expect_flag)
    head_norm: bool | None = option(None, "a norm on the last state", check=expect_flag, shown="the reading's")
    head_activation: Activation | None = option(
        None, 'what follows that norm: "tanh", "relu" or "none"', check=one_of("tanh", "relu", "none"),
        shown="the reading's",
    )  # fmt: skip
    reading: Reading = option(
        "paper",
        '"published" for what the authors\' program computes (deviations.md)',
        check=one_of("paper", "published"),
    )
    init: Init = option(
        "paper", '"identity" starts with a network that ignores the state', check=one_of("paper", "identity")
    )


def place_recurrent_state(
    model: nn.Module, options: RecurrentStateOptions, *, image_size: int | Grid | None = None
) -> Callable[[], None] | None:
    """Let a state run along the residual blocks of a ResNet, a MobileNetV2 or a pre-activated network."""
    name = type(model).__name__
    calls = record_calls(model, probe_image(model, image_size))
    stages = residual_stages(model, calls)
    blocks = [block.module for stage in stages for block in stage]
    preactivated = isinstance(blocks[0], ComponentBlock)
    inverted = not preactivated and not isinstance(blocks[0], (BasicBlock, Bottleneck))
    if options.reading == "published" and preactivated:
        raise AttachError(f"no program of the paper's authors has {name}: rla has reading='paper' here")
    if preactivated and options.head_activation == "none":
        raise OptionError(f"head_activation='none' means nothing in {name}, whose own ReLU follows")
    chosen = _resolved(options, inverted, preactivated)
    if chosen["insert"] == "shortcut" and not all(_has_shortcut(block) for block in blocks):
        raise AttachError(f"{name} has blocks without a shortcut: insert='shortcut' has nothing to read there")
    head = _find_head(model, preactivated)
    if head is not None and head.at is not None:
        entered = next((call.input for call in calls if call.module is head.at), None)
        if entered is not stages[-1][-1].output:
            raise AttachError(f"something lies between the last block of {name} and what would read the last state")
    channels = options.state_channels
    rla = RLA(
        [
            StagePlan(
                [residual.branch_channels(block.module) for block in stage],
                [residual.make_exchange(block.module, channels) for block in stage],
            )
            for stage in stages
        ],
        state_channels=channels,
        head_channels=None if head is None else residual.branch_channels(blocks[-1]),
        join=residual.conv_like(head.convolution, channels) if head and head.convolution else None,
        reading=options.reading,
        init=options.init,
        **chosen,
    )
    place_shared(model, KEY, rla, stages)
    if head is not None:
        head.join(model, rla, options.init)
    return partial(_wake_branches, blocks) if options.init == "paper" and rla.insert == "branch" else None


def _resolved(options: RecurrentStateOptions, inverted: bool, preactivated: bool) -> dict[str, Any]:
    """The options of `RLA`: defaults, then the reading's row, then the variant's, then what was given."""
    chosen: dict[str, Any] = {
        "insert": "branch", "joins": "before", "cell": "preact", "shared": True, "exchange": True,
        "depthwise": inverted, "cell_bias": True, "cell_norm": True, "head_norm": True,
        "head_activation": "relu" if preactivated else "tanh",
    }  # fmt: skip
    given = {name: value for name in chosen if (value := getattr(options, name)) is not None}
    wanted = {**VARIANTS[options.variant], **given}
    if options.reading == "published":
        chosen |= PUBLISHED["inverted" if inverted else "residual"]
        if not wanted.get("shared", True):
            chosen |= PUBLISHED["unshared"]
        if wanted.get("cell") in ("convlstm", "convgru"):
            chosen |= PUBLISHED["gated"]
    return {**chosen, **wanted}


def detach_head(model: Any) -> None:
    """Undo what `place_recurrent_state` did to the network's head."""
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
    """A module behind the last block that reads the last state: a norm beside it, or a convolution of both."""

    interlayer_state: tuple[RLA]  # in a tuple, so that torch does not take it for a submodule

    def forward(self, x: Any) -> Any:
        if not isinstance(x, Carried):
            return super().forward(x)  # type: ignore[misc]
        (rla,) = self.interlayer_state
        state = rla.last(x.memories[KEY][0])
        output = super().forward(x.x)  # type: ignore[misc]
        return torch.cat((output, state), 1) if rla.join is None else output + rla.join(state)


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
    columns_of_both = [kept]
    if change > 0:
        columns = kept.new_zeros(len(kept), change)
        if init == "paper":
            nn.init.uniform_(columns, -(model.num_features**-0.5), model.num_features**-0.5)
        columns_of_both.append(columns)
    classifier.weight = nn.Parameter(torch.cat(columns_of_both, 1), requires_grad=classifier.weight.requires_grad)
    classifier.in_features += change


def own_inputs(model: Any) -> tuple[nn.Linear, int] | None:
    """The classifier that also reads a state, and how many of its inputs are the backbone's."""
    rla = getattr(model, KEY, None)
    if not isinstance(rla, RLA) or rla.head_channels is None or rla.join is not None:
        return None
    classifier = model.get_classifier()
    return (classifier, rla.head_channels) if isinstance(classifier, nn.Linear) else None
