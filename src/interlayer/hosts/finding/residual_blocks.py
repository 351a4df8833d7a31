"""Finds the residual blocks of a network that mechanisms can work inside of, by stage."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from timm.models.resnet import BasicBlock, Bottleneck
from torch import nn

from .calls import Call
from .components import ComponentBlock, is_convolution, state_unsupported_reason, unsupported_reason
from .probe import AttachError


def residual_stages(model: nn.Module, calls: list[Call], *, reads_state: bool = False) -> list[list[Call]]:
    """Returns the residual blocks by stage. The network must run only these blocks between its stem and its head.

    Args:
        model: the network.
        calls: the calls of a forward pass, from `record_calls`.
        reads_state: whether the blocks must be able to read a recurrent state.

    A stage of a ResNet is the container of its blocks. In other networks it consists of the blocks with branches of the
    same resolution.
    """
    name = type(model).__name__
    why_not = state_unsupported_reason if reads_state else unsupported_reason
    residual = [call for call in calls if not is_convolution(call.module)]
    blocks = [call for call in residual if why_not(call.module) is None]
    looked_at = calls if reads_state and blocks else residual
    refused = [(call, why) for call in looked_at if _looks_residual(call.module) and (why := why_not(call.module))]
    if not blocks:
        known = "MobileNetV2 blocks" if reads_state else "EfficientNet, MobileNet and MNASNet blocks"
        raise AttachError(
            f"{name} has no residual blocks that a mechanism can enter: "
            + (refused[0][1] if refused else f"they are neither timm's ResNet blocks nor its {known}")
        )
    if refused:
        call, why = refused[0]
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


def _looks_residual(module: nn.Module) -> bool:
    is_efficientnet = type(module).__module__.endswith("._efficientnet_blocks") and hasattr(module, "feature_info")
    return is_efficientnet or isinstance(module, (BasicBlock, Bottleneck, ComponentBlock))
