"""The value that is passed from block to block: an output, the memories of mechanisms, and the grid of the tokens.

An attached block returns its output together with the memories of its mechanisms as one `Carried` value, which the next
block unpacks. Loops, `nn.Sequential` and gradient checkpointing pass the output of a block to the next block unchanged,
so nothing is stored on a module: a stage can be run twice, checkpointed, compiled, exported and copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from timm.layers import use_reentrant_ckpt
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from .extending import Extended, extend

Grid = tuple[int, int]
# Attributes of networks inside a network that return features of their own: those of timm and of transformers.
FEATURE_NETWORK = ("forward_intermediates", "main_input_name")


class Carried:
    """The output of a block and the values that are passed on with it.

    Code that reads the value between two blocks of a stage (timm does, to collect intermediate features) sees only the
    output: torch functions, indexing and tensor attributes apply to `x`.

    Args:
        x: the output.
        memories: the memories of the mechanisms by key; tensors, or trees of tensors.
        grid: height and width of the grid formed by the tokens of `x`, or None if no mechanism needs it.
    """

    def __init__(self, x: Tensor, memories: dict[str, Any], grid: Grid | None = None) -> None:
        self.x = x
        self.memories = memories
        self.grid = grid

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is checkpoint:  # called by torch.compile; the memories must enter the checkpoint
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*release(args), **release(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name in ("x", "memories", "grid"):  # not set yet while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.x, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.x[index]

    def with_output(self, x: Any) -> Any:
        """Returns a copy with another output. A value that is not a tensor, such as a list, is returned unchanged."""
        return Carried(x, self.memories, self.grid) if isinstance(x, Tensor) else x


# Registered as a tree of tensors, so that checkpointing, sharding and casts of a block's inputs reach its tensors.
_pytree.register_pytree_node(
    Carried,
    lambda carried: ([carried.x, carried.memories], carried.grid),
    lambda children, grid: Carried(*children, grid=grid),  # type: ignore[misc]
)


def release(value: Any) -> Any:
    """Returns `value` with every `Carried` in its lists, tuples and dicts replaced by its output."""
    if isinstance(value, Carried):
        return value.x
    if type(value) in (list, tuple):
        released = [release(item) for item in value]
        return value if _are_same(released, value) else type(value)(released)
    if isinstance(value, dict):
        by_key = {key: release(item) for key, item in value.items()}
        return value if _are_same(by_key.values(), value.values()) else type(value)(by_key)  # type: ignore[call-arg]
    return value


def _are_same(items: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(item is other for item, other in zip(items, others, strict=True))


def refuse_reentrant(layer: Any, carried: str = "the memory of a stage") -> None:
    """Raise an error if transformers runs this layer in a reentrant checkpoint, which sees only plain tensors."""
    checkpointing = layer.training and getattr(layer, "gradient_checkpointing", False)
    function = getattr(layer, "_gradient_checkpointing_func", None) if checkpointing else None
    if isinstance(function, partial) and function.keywords.get("use_reentrant", True):
        raise RuntimeError(
            f"reentrant checkpoints do not carry {carried} and would lose gradients: call "
            "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
        )


class Passing(Extended):
    """A module between attached blocks that passes on the memories and the grid of its input."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Carried):
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        refuse_reentrant(self)
        return x.with_output(super().forward(x.x, *args, **kwargs))  # type: ignore[misc]


class GridPassing(Extended):
    """A vision transformer for images of any size whose position embedding returns the grid with the tokens.

    The patch embedding returns a map [B, H, W, C], which `_pos_embed` flattens to tokens, [B, N, C].
    """

    @staticmethod
    def methods(base: Any) -> dict[str, Any]:
        @wraps(base._pos_embed)
        def _pos_embed(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = base._pos_embed(self, x, *args, **kwargs)
            if x.dim() != 4:
                return result
            grid = (x.shape[1], x.shape[2])
            if isinstance(result, tuple):  # tokens and rotary embeddings
                return (Carried(result[0], {}, grid), *result[1:])
            return Carried(result, {}, grid)

        return {"_pos_embed": _pos_embed}


class GridEmbedding(Extended):
    """A module that turns images into tokens by a convolution, and returns the grid with the tokens.

    `finding/patch_embedding.py` finds such modules. The first convolution of the module reads the image.
    """

    def forward(self, image: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(image, *args, **kwargs)  # type: ignore[misc]
        grid = grid_after(first_convolution(self), image)  # type: ignore[arg-type]
        return (Carried(result[0], {}, grid), *result[1:]) if isinstance(result, tuple) else Carried(result, {}, grid)


def first_convolution(module: nn.Module) -> nn.Conv2d | None:
    """Returns the first 2-D convolution among the submodules of a module, or None."""
    return next((child for child in module.modules() if isinstance(child, nn.Conv2d)), None)


def grid_after(convolution: nn.Conv2d, image: Tensor) -> Grid:
    """Returns height and width of the output of a convolution."""
    sides = []
    for axis, size in enumerate(image.shape[-2:]):
        kernel, stride = convolution.kernel_size[axis], convolution.stride[axis]
        padding = convolution.padding[axis] if isinstance(convolution.padding, tuple) else 0
        sides.append((size + 2 * padding - convolution.dilation[axis] * (kernel - 1) - 1) // stride + 1)
    return sides[0], sides[1]


class AttachedModel(Extended):
    """A network with attached blocks. It returns plain tensors, also from the middle of a stage.

    Attributes:
        interlayer_joining: names of the network's own mechanisms with a memory that is joined to its last features.
    """

    class_prefix = ""  # transformers saves the name of the class with the weights
    interlayer_joining: tuple[str, ...] = ()

    @staticmethod
    def methods(base: Any) -> dict[str, Any]:
        """Returns the methods of `base` that return features, with their signatures, which torch.export reads."""
        names = ("forward", "forward_features", "forward_intermediates")
        wrapped = {name: _releasing(getattr(base, name), name) for name in names if hasattr(base, name)}
        if hasattr(base, "set_grad_checkpointing"):
            wrapped["set_grad_checkpointing"] = _refusing_reentrant(base.set_grad_checkpointing)
        return wrapped


def release_from(model: nn.Module, blocks: Sequence[str]) -> None:
    """Make the network, and every submodule that returns features of these blocks, return plain tensors."""
    for name, module in list(model.named_modules()):
        runs_blocks = not name or any(block.startswith(f"{name}.") for block in blocks)
        returns_features = not name or any(hasattr(module, attribute) for attribute in FEATURE_NETWORK)
        if runs_blocks and returns_features:
            extend(module, AttachedModel)


def _releasing(method: Any, name: str) -> Any:
    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if name == "forward_features":
            result = _joined(self, result)
        elif name == "forward_intermediates" and isinstance(result, tuple):
            result = (_joined(self, result[0]), *result[1:])
        return release(result)

    return run


def _joined(model: Any, features: Any) -> Any:
    """Returns the last features joined with the memories of `interlayer_joining`."""
    for name in model.interlayer_joining:
        mechanism = getattr(model, name)
        memories = features.memories if isinstance(features, Carried) else {}
        if name in memories or mechanism.switched_off:
            joined = mechanism.join_features(release(features), memories.get(name))
            features = features.with_output(joined) if isinstance(features, Carried) else joined
    return features


def _refusing_reentrant(method: Any) -> Any:
    @wraps(method)
    def set_grad_checkpointing(self: Any, enable: bool = True, **kwargs: Any) -> Any:
        if enable and use_reentrant_ckpt():
            raise RuntimeError(
                "reentrant checkpoints do not carry a stage's memory and would lose gradients: call "
                "timm.layers.set_reentrant_ckpt(False) first"
            )
        return method(self, enable, **kwargs)

    return set_grad_checkpointing
