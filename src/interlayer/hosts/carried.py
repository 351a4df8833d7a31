"""The value that travels from block to block: an output, the memories of mechanisms, and the grid of its tokens.

An attached block returns its output together with what its mechanisms remember, as one `Carried` value, and the next
block opens it. Loops, Sequentials and gradient checkpoints hand a block's output to the next block untouched, so
nothing is kept on a module: a stage can be run twice, checkpointed, compiled, exported and copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from timm.layers import use_reentrant_ckpt
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from .extending import Extended, extend

Grid = tuple[int, int]


class Carried:
    """A block's output and what travels with it.

    Whoever reads it between two blocks of a stage (timm does, to collect intermediate features) sees the output alone:
    torch functions, indexing and tensor attributes apply to `x`.

    Args:
        x: the output.
        memories: the mechanisms' memories by their keys; tensors, or trees of them.
        grid: height and width of the grid that the tokens of `x` form; None where nobody needs to know.
    """

    def __init__(self, x: Tensor, memories: dict[str, Any], grid: Grid | None = None) -> None:
        self.x = x
        self.memories = memories
        self.grid = grid

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is checkpoint:  # torch.compile asks here; the memory belongs into the checkpoint
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*release(args), **release(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name in ("x", "memories", "grid"):  # not there yet: being copied or unpickled
            raise AttributeError(name)
        return getattr(self.x, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.x[index]

    def with_output(self, x: Any) -> Any:
        """The same with another output; what is not a tensor, such as a list of features, is returned as it is."""
        return Carried(x, self.memories, self.grid) if isinstance(x, Tensor) else x


# Known to torch as a tree of tensors: checkpoints, sharding and casts of a block's inputs reach what is inside.
_pytree.register_pytree_node(
    Carried,
    lambda carried: ([carried.x, carried.memories], carried.grid),
    lambda children, grid: Carried(*children, grid=grid),  # type: ignore[misc]
)


def release(value: Any) -> Any:
    """`value` with every `Carried` in its lists, tuples and dicts replaced by its plain output."""
    if isinstance(value, Carried):
        return value.x
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(release(item) for item in value) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return type(value)((key, release(item)) for key, item in value.items())
    return value


class Passing(Extended):
    """A module between attached blocks that hands on what travels with its input."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Carried):
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        return x.with_output(super().forward(x.x, *args, **kwargs))  # type: ignore[misc]


class GridPassing(Extended):
    """A vision transformer for images of any size: its position embedding sends the grid along with the tokens.

    The patch embedding returns a map [B, H, W, C], which `_pos_embed` flattens to tokens that do not tell their grid.
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


class AttachedModel(Extended):
    """A network that runs attached blocks: what it returns, also from the middle of a stage, are plain tensors.

    Attributes:
        interlayer_joining: names of the network's own mechanisms whose memory joins its last features.
    """

    interlayer_joining: tuple[str, ...] = ()

    @staticmethod
    def methods(base: Any) -> dict[str, Any]:
        """The methods of `base` that hand out features, with its signatures, which torch.export reads."""
        names = ("forward", "forward_features", "forward_intermediates")
        wrapped = {name: _releasing(getattr(base, name), name) for name in names if hasattr(base, name)}
        if hasattr(base, "set_grad_checkpointing"):
            wrapped["set_grad_checkpointing"] = _refusing_reentrant(base.set_grad_checkpointing)
        return wrapped


def release_from(model: nn.Module, blocks: Sequence[str]) -> None:
    """Make the network, and every submodule that hands out features of these blocks, return plain tensors."""
    for name, module in list(model.named_modules()):
        runs_blocks = not name or any(block.startswith(f"{name}.") for block in blocks)
        hands_out_features = not name or hasattr(module, "forward_intermediates")
        if runs_blocks and hands_out_features:
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
    """The last features with the memories that join them."""
    if isinstance(features, Carried):
        for name in model.interlayer_joining:
            if name in features.memories:
                joined = getattr(model, name).join_features(features.x, features.memories[name])
                features = features.with_output(joined)
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
