"""Places layer attention after every block of a stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from timm.layers import LayerNorm2d
from torch import nn

from ...mechanisms import LayerAttention
from ...mechanisms.layer_attention import Projection, Style
from ...mechanisms.mrla import Previous
from ...mechanisms.options import (
    Control,
    Init,
    OptionError,
    Reading,
    expect_flag,
    expect_whole,
    one_of,
    option,
    values_of,
)
from ..carried import Grid
from ..finding.blocks import Stages, find_stages
from ..finding.calls import Call
from ..finding.probe import AttachError
from ..finding.stages import Stage
from ..stochastic_depth import drop_path_rate, returns_factors
from .blocks import place_in_stage

KEY = "mrla"  # name of the submodule in a block, and prefix of its parameters
CHANNELS_PER_HEAD = {"cnn": 32, "mbconv": 8, "transformer": 16}  # section 5.1
OTHER_LAYERS = "attending to other layers"
# The softmax of a layer over itself alone is one, so nothing but the values is left, as with attention=False.
SELF_ALONE = Control(
    {"cross_layer": False},
    left="each layer attends to itself alone, which leaves the depthwise convolution and the norm",
    tested=OTHER_LAYERS,
    unless={"attention": False},
)
LIGHT_CONTROLS = (
    Control(
        {"cross_layer": False},
        left="no layer reads the one before it",
        tested=OTHER_LAYERS,
        without=("previous",),
        unless={"memory": False, "attention": False},
    ),
    Control(
        {"attention": False},
        left="the depthwise convolution and the norm alone",
        tested="layer attention",
        without=("cross_layer", "memory", "learn_decay", "previous", "projection"),
        unless={"value_conv": False},
    ),
)
PLACING = ("channels_per_head", "drop_path", "stages", "blocks")  # options that are resolved here


def _expect_drop_path(name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value not in ("backbone", "backbone_rate") and not (number and 0 <= value < 1):
        raise OptionError(f"drop_path must be a probability below 1, 'backbone' or 'backbone_rate', got {value!r}")


@dataclass(frozen=True, kw_only=True)
class LayerAttentionOptions:
    """Options of every form of layer attention."""

    projection: Projection = option(
        "conv1d", 'the projections to q and k: "conv1d", or "linear" to C / 16 channels (Table 4 d)',
        check=one_of("conv1d", "linear"),
    )  # fmt: skip
    value_conv: bool = option(True, "False omits the depthwise convolution, V = x (Table 4 c)", check=expect_flag)
    attention: bool = option(
        True, "False keeps only the depthwise convolution and the norm (Table 4 g)", check=expect_flag
    )
    cross_layer: bool = option(
        True, "False is a control: every layer attends to itself alone, with the same parameters", check=expect_flag
    )
    channels_per_head: int | None = option(
        None, "must divide the channels of every stage", check=expect_whole,
        shown="32 (CNN), 8 (MBConv), 16 (transformer), or the largest smaller divisor of the channels",
    )  # fmt: skip
    drop_path: float | Literal["backbone", "backbone_rate"] = option(
        "backbone",
        'stochastic depth of the attention: "backbone" drops it for the samples whose last residual branch the block '
        'drops (appendices B.1.1 and B.4), "backbone_rate" at the rate of the block with a draw of its own, and a '
        "number at that rate",
        check=_expect_drop_path,
    )
    init: Init = option("paper", '"identity" preserves the function of the network', check=one_of("paper", "identity"))
    reading: Reading = option(
        "paper",
        '"published" computes what the authors\' program computes (deviations.md)',
        check=one_of("paper", "published"),
    )
    add_prefix: bool | None = option(
        None,
        "add the normalized prefix tokens of a transformer to the prefix tokens",
        check=expect_flag,
        shown="set by the reading",
    )
    stages: Stages | None = option(
        None,
        "lengths such as (6, 6), or lists of block names such as [['layer3.0', 'layer3.1']]",
        shown="found from the model",
    )
    blocks: Literal["auto", "all"] = option(
        "auto", '"all" includes blocks without an identity skip (in MBConv networks)', check=one_of("auto", "all")
    )


@dataclass(frozen=True, kw_only=True)
class LightOptions(LayerAttentionOptions):
    """Options of MRLA-light."""

    memory: bool = option(True, "False omits lambda times the previous output (Table 4 b)", check=expect_flag)
    learn_decay: bool = option(True, "False fixes lambda to one (Table 4 e)", check=expect_flag)
    previous: Previous | None = option(
        None, 'the previous output: the "attention" of the previous layer or the "shortcut" of the block',
        check=one_of("attention", "shortcut"), shown="set by the reading",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BaseOptions(LayerAttentionOptions):
    """Options of MRLA-base."""

    relu: bool | None = option(
        None, "apply a ReLU between the norm and the sum in a CNN", check=expect_flag, shown="set by the reading"
    )


@dataclass(frozen=True, kw_only=True)
class LinearOptions(LayerAttentionOptions):
    """Options of the linearized form."""

    constant_memory: bool = option(
        False,
        "pass on the sums U and Z, for stages of more layers than a head has channels",
        check=expect_flag,
    )


def place_layer_attention(
    model: nn.Module,
    options: LayerAttentionOptions,
    *,
    make: type[LayerAttention],
    mechanism: str,
    fixed_channels_per_head: int | None = None,
    image_size: int | Grid | None = None,
) -> None:
    """Add layer attention of class `make` after the blocks of `model`."""
    channels_per_head, stages = options.channels_per_head, options.stages
    if channels_per_head is None:
        channels_per_head = fixed_channels_per_head
    elif fixed_channels_per_head is not None and channels_per_head != fixed_channels_per_head:
        raise OptionError(
            f"{mechanism} has channels_per_head={fixed_channels_per_head}, got {channels_per_head}; "
            f"mrla_light takes any number"
        )
    every_block = options.blocks == "all" or stages is not None
    norm_layer = _norm_layer_for(model)
    placed: list[tuple[Stage, list[Call], list[LayerAttention]]] = []
    for stage in find_stages(model, stages=stages, image_size=image_size):
        chosen = [block for block in stage.blocks if every_block or block.identity_skip]
        style: Style = "cnn" if stage.layout.kind == "NCHW" else "transformer"
        per_head = _default_channels_per_head(stage, style) if channels_per_head is None else channels_per_head
        made = []
        for index, block in enumerate(chosen):
            rate = drop_path_rate(block.module) if isinstance(options.drop_path, str) else options.drop_path
            attention = make(
                stage.channels,
                style=style,
                channels_per_head=per_head,
                norm_layer=norm_layer,
                drop_path=rate,
                shared_drop_path=options.drop_path == "backbone" and returns_factors(block.module),
                **values_of(options, without=PLACING),
            )
            attention.layer = index
            made.append(attention)
        if chosen:
            placed.append((stage, chosen, made))
    if not placed:
        raise AttachError(f"{type(model).__name__} has no block with an identity skip; blocks='all' takes every block")
    _refuse_meaningless(options, {attention.style for _, _, made in placed for attention in made}, type(model).__name__)
    for number, (stage, chosen, made) in enumerate(placed):
        place_in_stage(model, KEY, number, stage, made, chosen)


def _refuse_meaningless(options: LayerAttentionOptions, styles: set[str], name: str) -> None:
    """Raise an error for options that were given and would have no effect in this network."""
    if options.add_prefix and "transformer" not in styles:
        raise OptionError(f"add_prefix=True adds prefix tokens, which {name} does not have: leave it out")
    if getattr(options, "relu", None) and "cnn" not in styles:
        raise OptionError(f"relu=True follows the norm of a CNN, which {name} is not: leave it out")
    reads = options.cross_layer and options.attention and getattr(options, "memory", True)
    if getattr(options, "previous", None) and not reads:
        raise OptionError(
            "previous= has no effect where memory=False, attention=False or cross_layer=False leaves out that output"
        )


def _default_channels_per_head(stage: Stage, style: str) -> int:
    mbconv = any(hasattr(block.module, "has_skip") for block in stage.blocks)
    wanted = CHANNELS_PER_HEAD["mbconv" if mbconv else style]
    return max(divisor for divisor in range(1, wanted + 1) if stage.channels % divisor == 0)


def _norm_layer_for(model: nn.Module) -> Callable[[int], nn.Module]:
    """Returns BatchNorm2d, or LayerNorm2d if the network has norms and none of them is a batch norm."""
    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    if norms and not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in norms):
        return partial(LayerNorm2d, eps=1e-6)
    return nn.BatchNorm2d
