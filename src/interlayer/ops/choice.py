"""The backend that the calling thread or asyncio task has chosen.

The choice is stored in a context variable, which only the thread or task that set it can see. Two cases need special
treatment:

- Dynamo cannot read a context variable in every supported version of torch. It reads the attribute `CURRENT` of this
  module instead, which `__getattr__` computes. Dynamo evaluates such an attribute during tracing, and again in a guard
  before it runs the compiled code, in the thread or task that calls it. Each choice thus has its own compiled code.
- Autograd runs the backward pass on a GPU in threads of its own. torch 2.15 passes them the context of the thread or
  task that called `backward()`. torch 2.11 does not, and they use the most recent choice in the process instead.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch.compiler import is_dynamo_compiling

AUTO = "auto"
REFERENCE = "reference"

_chosen: ContextVar[str | None] = ContextVar("interlayer_backend", default=None)
_default = AUTO  # used by threads and tasks that have not chosen a backend
_entered: list["_Entered"] = []  # the open `with` blocks of the process, most recent last
_this_module = sys.modules[__name__]


class _Traced(threading.local):
    """A choice made inside a function traced by Dynamo, which cannot set a context variable."""

    def __init__(self) -> None:  # not a class attribute: Dynamo guards on instance attributes
        self.name: str | None = None


_traced = _Traced()


def current() -> str:
    """Returns the name of the backend in effect."""
    if is_dynamo_compiling():
        return _traced.name or _this_module.CURRENT  # type: ignore[no-any-return]
    name = _chosen.get()
    if name is not None:
        return name
    return _choice_of_caller() if _entered else _default


def _choice_of_caller() -> str:
    """Returns the choice of the caller of `backward()` in a thread of the autograd engine, otherwise the default."""
    if torch._C._current_graph_task_id() == -1:  # not in a backward pass
        return _default
    if not isinstance(threading.current_thread(), threading._DummyThread):  # a thread started by Python
        return _default
    context = torch._C._get_obj_in_tls("context") if torch._C._is_key_in_tls("context") else None
    if context is not None:
        return context.get(_chosen) or _default
    latest = _entered[-1:]
    return latest[0].name if latest else _default


def __getattr__(name: str) -> str:
    if name == "CURRENT":
        return current()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def set_default(name: str) -> None:
    """Sets the backend of all threads and tasks of the process that have not chosen one."""
    global _default
    _default = name


@contextmanager
def choose(name: str) -> Iterator[None]:
    """Context manager that sets the backend of the calling thread or task."""
    if is_dynamo_compiling():
        before = _traced.name
        _traced.name = name
        try:
            yield
        finally:
            _traced.name = before
        return
    entered, before = _Entered(name), _chosen.get()
    _entered.append(entered)
    _chosen.set(name)
    try:
        yield
    finally:
        _chosen.set(before)
        _entered.remove(entered)


@dataclass(frozen=True, eq=False)  # compared by identity: blocks may be exited in any order
class _Entered:
    name: str
