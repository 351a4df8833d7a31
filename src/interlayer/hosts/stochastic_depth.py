"""Stochastic depth of a block, and the samples that it drops.

A block with stochastic depth multiplies the residual branch of each sample by a random factor: 0, or 1 / (1 - rate). A
mechanism that is dropped where the block is needs these factors, which timm's blocks draw inside `forward` and do not
return. `forward_with_factors` runs the unchanged `forward` of a block on a view of it, whose stochastic depth layers
record their factors in a list of this call. Nothing is stored on a module, so a block can be run twice, checkpointed,
compiled and copied, and the factors are those that the same block draws without a mechanism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .extending import original_class


def is_drop_path(module: object) -> bool:
    """Whether a module is a stochastic depth layer of timm or transformers."""
    return isinstance(module, nn.Module) and type(module).__name__.endswith("DropPath")


def drop_path_rate(block: nn.Module) -> float:
    """Returns the stochastic depth rate of a block, the largest if it has several."""
    layers: list[Any] = [module for module in block.modules() if is_drop_path(module)]
    return max((float(getattr(layer, "drop_prob", None) or 0.0) for layer in layers), default=0.0)


def returns_factors(block: nn.Module) -> bool:
    """Whether `forward_with_factors` can run a block. Stochastic depth layers of its submodules cannot be read."""
    cls: Any = original_class(block)
    code = getattr(cls.forward, "__code__", None)
    if code is None or "__class__" in code.co_freevars:  # super() in `forward` does not accept a view
        return False
    return any(is_drop_path(child) and getattr(child, "drop_prob", None) for child in block.children())


def recording(layer: nn.Module, factors: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns a function that applies a stochastic depth layer and appends the factors, [B], to a list in training."""
    if not layer.training:
        return layer

    def apply(branch: Tensor) -> Tensor:
        factor = layer(branch.new_ones(branch.shape[0]))
        factors.append(factor)
        return branch * factor.reshape(-1, *(1,) * (branch.dim() - 1))

    return apply


class _View:
    """A block as its own `forward` sees it, with stochastic depth layers that record their factors."""

    def __init__(self, block: nn.Module, factors: list[Tensor]) -> None:
        self.interlayer_block = block
        self.interlayer_factors = factors

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.interlayer_block, name)
        return recording(value, self.interlayer_factors) if is_drop_path(value) else value


def forward_with_factors(block: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, list[Tensor]]:
    """Run a block and return its output and the factors of its residual branches, [B] each, in order."""
    factors: list[Tensor] = []
    cls: Any = original_class(block)
    return cls.forward(_View(block, factors), *args, **kwargs), factors
