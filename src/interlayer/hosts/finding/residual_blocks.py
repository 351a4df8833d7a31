"""Finds the residual blocks of a network that mechanisms can work inside of, by stage."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from timm.models.resnet import BasicBlock, Bottleneck
from torch import nn

from .calls import Call
from .components import ComponentBlock, unsupported_reason
from .probe import AttachError


def residual_stages(model: nn.Module, calls: list[Call]) -> list[list[Call]]:
    """Returns the residual blocks by stage. The network must run only these blocks between its stem and its head.

    A stage of a ResNet is the container of its blocks. In other networks it consists of the blocks with branches of the
    same resolution.
    """
    name = type(model).__name__
    blocks = [call for call in calls if unsupported_reason(call.module) is None]
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
                f"{name} runs something between {before.name} and {block.name}, so no memory can be passed between them"
            )
    stages: list[list[Call]] = []
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
    """Returns the reason why a module that looks like a residual block is not supported, or None."""
    is_efficientnet = type(module).__module__.endswith("._efficientnet_blocks") and hasattr(module, "feature_info")
    looks = is_efficientnet or isinstance(module, (BasicBlock, Bottleneck, ComponentBlock))
    return unsupported_reason(module) if looks else None
