"""Networks on the meta device, faster: the layout of a result is computed once for equal arguments.

A tensor on the meta device has a shape and no values. torch computes the shapes of most results in Python, and those of
a batch norm by a dozen operators. The layers of a network repeat, and so do these computations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

PLAIN = (Tensor, nn.Parameter)  # a subclass may be more than a layout
SIMPLE = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class _Layout(NamedTuple):
    """What distinguishes one tensor on the meta device from another."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    def tensor(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class _Result(NamedTuple):
    """Result of an operator: the layouts of its new tensors, and the increase of the count."""

    layouts: tuple[_Layout, ...]
    increase: int


Memory = dict[Any, _Result]


class RememberedShapes(TorchDispatchMode):
    """Inside the `with` block, an operator on the meta device runs once for each layout of its arguments.

    After that, its result is made from the layouts of the first one: new tensors, or the first argument of an operator
    that works in place. Operators on other devices run as always.

    Args:
        memory: the results to start from and to add to, of blocks with the same kind of count. Default: none.
        count: returns a count that operators increase, such as that of FLOPs, which has to be entered before.

    Attributes:
        repeated: the increase of the count by the operators that did not run.

    >>> with torch.device("meta"), RememberedShapes():
    ...     model = timm.create_model("resnet152_mrla_light")
    """

    def __init__(self, memory: Memory | None = None, count: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self.memory: Memory = {} if memory is None else memory
        self.count = count
        self.repeated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind == "view" and type(args[0]) in PLAIN and args[0].is_meta:
            with no_dispatch():  # there is nothing to count
                return func(*args, **kwargs)
        key = _key(func, args, kwargs) if kind in ("new", "in place") else None
        if key is None:
            return func(*args, **kwargs)
        known = self.memory.get(key)
        if known is None:
            before = self.count()
            result = func(*args, **kwargs)
            layouts = () if kind == "in place" else _layouts(result)
            if layouts is not None:
                self.memory[key] = _Result(layouts, self.count() - before)
            return result
        self.repeated += known.increase
        if kind == "in place":
            return args[0]
        with no_dispatch():
            tensors = tuple(layout.tensor() for layout in known.layouts)
        return tensors[0] if len(func._schema.returns) == 1 else tensors


@cache
def _kind(func: Any) -> Literal["new", "in place", "view", "other"]:
    """Returns whether an operator returns new tensors, its first argument with an unchanged layout, or views."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace not in ("aten", "prims"):
        return "other"
    arguments, returns = func._schema.arguments, func._schema.returns
    if not any("Tensor" in str(value.type) for value in arguments):
        return "other"  # a new tensor of a given shape is quick
    if not func._schema.is_mutable:
        if any(value.alias_info is not None for value in returns):
            return "view" if str(arguments[0].type) == "Tensor" else "other"
        return "new" if returns and all(str(value.type) == "Tensor" for value in returns) else "other"
    written = [value.alias_info is not None and value.alias_info.is_write for value in arguments]
    in_place = len(returns) == 1 and returns[0].alias_info is not None and written[0] and not any(written[1:])
    return "in place" if in_place and torch.Tag.inplace_view not in func.tags else "other"


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns what determines the layout of the result, or None if an argument is not known to do so."""
    entries = tuple(_entry(value) for value in args)
    named = tuple((name, _entry(value)) for name, value in kwargs.items())
    if None in entries or any(entry is None for _, entry in named):
        return None
    return func, entries, named


def _entry(value: Any) -> Any:
    """Returns a hashable description of an argument, or None if there is none."""
    if isinstance(value, Tensor):
        if type(value) not in PLAIN or not value.is_meta:
            return None
        return _Layout(value.shape, value.stride(), value.dtype, int(value.storage_offset()))
    if isinstance(value, (list, tuple)):
        entries = tuple(_entry(item) for item in value)
        return None if None in entries else entries
    # an equal number of another type can give another dtype
    return (type(value), value) if isinstance(value, SIMPLE) else None


def _layouts(result: Any) -> tuple[_Layout, ...] | None:
    """Returns the layouts of new tensors, or None if the result is something else."""
    entries = [_entry(item) for item in (result if isinstance(result, tuple) else (result,))]
    whole = all(isinstance(entry, _Layout) and not entry.offset for entry in entries)
    return tuple(entries) if whole else None
