"""The backend that the calling thread or asyncio task has chosen.

The choice is a context variable: it is visible in the thread or task that made it and nowhere else. Two readers need
help:

- Dynamo cannot read a context variable in every version of torch that is supported. It reads this module's attribute
  `CURRENT` instead, which `__getattr__` computes. Dynamo evaluates such an attribute while it traces, and again in a
  guard before it runs the compiled code, in the thread or task that calls it. Another choice therefore runs other
  compiled code.
- Autograd runs the backward pass of a GPU in threads of its own. torch 2.15 hands them the context of the thread or
  task that called `backward()`, torch 2.11 does not: there they use the choice that was made last in the process.
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
_default = AUTO  # for the whole process
_entered: list["_Entered"] = []  # the `with` blocks that the process is in, the latest last
_this_module = sys.modules[__name__]


class _Traced(threading.local):
    """A choice made inside a function that Dynamo traces, which cannot set a context variable."""

    def __init__(self) -> None:  # not a class attribute: Dynamo guards on what is in the instance
        self.name: str | None = None


_traced = _Traced()


def current() -> str:
    """The name of the backend in effect."""
    if is_dynamo_compiling():
        return _traced.name or _this_module.CURRENT  # type: ignore[no-any-return]
    name = _chosen.get()
    if name is not None:
        return name
    return _choice_of_caller() if _entered else _default


def _choice_of_caller() -> str:
    """In a thread of autograd's, the choice of the thread that called `backward()`; elsewhere the default."""
    if torch._C._current_graph_task_id() == -1:  # not in a backward pass
        return _default
    if not isinstance(threading.current_thread(), threading._DummyThread):  # a thread that Python has started
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
    """Set the backend for every thread and task of the process that has not chosen one."""
    global _default
    _default = name


@contextmanager
def choose(name: str) -> Iterator[None]:
    """Choose a backend for the calling thread or task, inside the `with` block."""
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


@dataclass(frozen=True, eq=False)  # compared by identity: blocks may be left in another order than they were entered
class _Entered:
    name: str
