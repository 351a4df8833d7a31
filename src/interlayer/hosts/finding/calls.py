"""Records the modules that a network calls, with their inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...mechanisms.protocol import BlockMechanism
from ..carried import release
from .probe import AttachError, evaluating, reason


@dataclass
class Call:
    """One call of a module: its name in the network, its input and its output."""

    name: str
    module: nn.Module
    input: Tensor | None
    output: Tensor
    arguments: tuple[Any, ...] = ()

    @property
    def is_container(self) -> bool:
        return type(self.module) is nn.Sequential

    @property
    def identity_skip(self) -> bool:
        """False if the block declares that its input is not added to its output (timm's MBConv blocks)."""
        return bool(getattr(self.module, "has_skip", True))


def record_calls(model: nn.Module, image: Tensor) -> list[Call]:
    """Returns the calls of one forward pass that take and return a feature map, in the order in which they end."""
    calls: list[Call] = []
    handles = []
    for name, module in model.named_modules():
        if not name or isinstance(module, BlockMechanism):  # a container may run a shared mechanism
            continue

        def record(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            output, first = release(output), release(args[0]) if args else None
            if isinstance(output, Tensor) and output.dim() in (3, 4) and output.shape[0] == image.shape[0]:
                first = first if isinstance(first, Tensor) else None
                calls.append(Call(name, module, first, output, (*args[1:], *kwargs.values())))

        handles.append(module.register_forward_hook(record, with_kwargs=True))
    try:
        with evaluating(model), torch.no_grad():
            model(image)
    except Exception as error:
        raise AttachError(
            f"{type(model).__name__} did not run on a probe image of shape {tuple(image.shape)} ({reason(error)}); "
            f"pass the input size of the model as image_size="
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    names = [call.name for call in calls]
    return [call for call in calls if names.count(call.name) == 1]  # a module called twice is not a single layer
