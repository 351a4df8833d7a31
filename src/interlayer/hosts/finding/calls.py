"""Records the modules that a network calls, with their inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...mechanisms.protocol import BlockMechanism
from ..carried import release
from .probe import AttachError, evaluating, reason


@dataclass
class Call:
    """One call of a module.

    Args:
        name: the name of the module in the network.
        module: the module.
        input: its first argument, or None if that is not a tensor.
        output: its output, or the first of its outputs.
        positional: its other positional arguments.
        keywords: its keyword arguments.
    """

    name: str
    module: nn.Module
    input: Tensor | None
    output: Tensor
    positional: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All arguments after the first one."""
        return (*self.positional, *self.keywords.values())

    @property
    def is_container(self) -> bool:
        return type(self.module) is nn.Sequential

    @property
    def identity_skip(self) -> bool:
        """False if the block declares that its input is not added to its output (timm's MBConv blocks)."""
        return bool(getattr(self.module, "has_skip", True))


def first_output(output: Any, first_input: Any) -> Any:
    """Returns the first output of a module that returns a tuple in one of two ways, which are those of transformers.

    A block may return attention weights, or None, after an output of the shape of its input. A patch embedding, which
    takes an image and returns tokens, may return numbers after them. Other outputs are returned unchanged.
    """
    if not (isinstance(output, tuple) and output and isinstance(output[0], Tensor) and isinstance(first_input, Tensor)):
        return output
    is_block = len(output) <= 2 and output[0].shape == first_input.shape and isinstance(output[-1], Tensor | None)
    embeds = first_input.dim() == 4 and output[0].dim() == 3
    if is_block or (embeds and not any(isinstance(o, Tensor) for o in tree_leaves(output[1:]))):
        return output[0]
    return output


def record_calls(model: nn.Module, image: Tensor) -> list[Call]:
    """Returns the calls of one forward pass that take and return a feature map, in the order in which they end."""
    calls: list[Call] = []
    handles = []
    for name, module in model.named_modules():
        if not name or isinstance(module, BlockMechanism):  # a container may run a shared mechanism
            continue

        def record(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            first = release(args[0]) if args else None
            output = first_output(release(output), first)
            if isinstance(output, Tensor) and output.dim() in (3, 4) and output.shape[0] == image.shape[0]:
                first = first if isinstance(first, Tensor) else None
                calls.append(Call(name, module, first, output, tuple(args[1:]), dict(kwargs)))

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
