"""Selection of the implementation that computes an operation.

Every operation has a reference in plain PyTorch, which defines its result, and may have faster implementations. They
are listed at the end of the operation's file, in the order in which they are tried. Each one states its limits in one
predicate, `unsupported_reason`. With "auto", the first implementation that supports the arguments runs, or the
reference if none does. An implementation chosen by name runs, or raises an error that states the reason.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .choice import AUTO, REFERENCE, choose, current, set_default

Predicate = Callable[..., str | None]

# The only reason for which an implementation chosen by name is skipped instead of raising an error.
TRACED = "the operators called here are traced or transformed, which the kernel does not support"


@dataclass(frozen=True)
class Implementation:
    """An implementation of an operation.

    Args:
        name: The name accepted by `backend`.
        function: The function that computes the operation, with the signature of the reference.
        unsupported_reason: A function with the same signature that returns why the arguments are not supported, or
            None if they are.
        strict: Whether an error is raised if the implementation is chosen by name and does not support the arguments.
            If False, the reference runs.
    """

    name: str
    function: Callable[..., Any]
    unsupported_reason: Predicate
    strict: bool = True


def triton_implementation(file: str, function: str | None = None, *, strict: bool = True) -> list[Implementation]:
    """Returns the kernel in `ops/_triton/<file>.py` as a list, which is empty if Triton is not installed.

    Args:
        file: The name of the file, without its extension.
        function: The name of the function in that file. Default: `file`.
        strict: See `Implementation`.
    """
    if find_spec("triton") is None:
        return []
    module = import_module(f"._triton.{file}", __package__)
    return [Implementation("triton", getattr(module, function or file), module.unsupported_reason, strict)]


class Operation:
    """A function on tensors with a reference and any number of other implementations.

    Args:
        name: The operation's name in error messages.
        reference: The function that defines the result.
        implementations: The other implementations, in the order in which they are tried.
    """

    def __init__(
        self, name: str, reference: Callable[..., Any], implementations: Sequence[Implementation] = ()
    ) -> None:
        self.__name__ = name
        self.__doc__ = reference.__doc__
        self.reference = reference
        self.implementations = list(implementations)
        _OPERATIONS[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wanted = current()
        if wanted == REFERENCE or not self.implementations:
            return self.reference(*args, **kwargs)
        for implementation in self.implementations:
            if wanted != AUTO and wanted != implementation.name:
                continue
            reason = implementation.unsupported_reason(*args, **kwargs)
            if reason is None:
                return implementation.function(*args, **kwargs)
            if wanted != AUTO and implementation.strict and reason != TRACED:
                raise ValueError(f"backend {wanted!r} cannot compute {self.__name__}: {reason}")
        return self.reference(*args, **kwargs)


_OPERATIONS: dict[str, Operation] = {}


def operation_named(name: str) -> Operation:
    """Returns the operation `name`. Used by kernels, which cannot import the operation that lists them."""
    return _OPERATIONS[name]


def is_chosen(name: str) -> bool:
    """Returns whether the implementation `name` was chosen by name."""
    return current() == name


def backends() -> list[str]:
    """Returns the names accepted by `backend`: "auto", "reference" and the names of all implementations."""
    names = {i.name for operation in _OPERATIONS.values() for i in operation.implementations}
    return [AUTO, REFERENCE, *sorted(names)]


def _checked(name: str, source: str) -> str:
    if name not in backends():
        raise ValueError(f"{source}: unknown backend {name!r}, expected one of {', '.join(backends())}")
    return name


def backend(name: str) -> AbstractContextManager[None]:
    """Context manager that selects the implementation of every operation called inside it.

    An operation without an implementation of that name runs its reference.

    The following threads and tasks see the choice:

    - The thread or asyncio task that entered the context manager, until it exits. Other running threads and tasks are
      not affected.
    - asyncio tasks created inside the context manager, and functions run there by :func:`asyncio.to_thread`: they
      inherit it like every context variable. A :class:`threading.Thread` or an executor's worker started inside it
      does not inherit it, unless Python's ``thread_inherit_context`` flag is set. Enter the context manager in the
      function that the thread runs instead.
    - Backward passes called inside it. Autograd runs them in the calling thread on a CPU and in a thread of its own on
      a GPU. In both cases, operations called there, such as the recomputation of a forward pass under gradient
      checkpointing, use the choice of the thread or task that called ``backward()``. Enter the same backend for the
      forward and the backward pass. Versions of torch that do not pass the caller's context to the GPU's thread, such
      as 2.11, use the most recently entered context manager of the whole process that is still open; set
      INTERLAYER_BACKEND instead if several threads train with different backends there.

    Threads and tasks that have made no choice use the environment variable INTERLAYER_BACKEND, which is read when the
    package is imported, or "auto" if it is not set.

    A function compiled by ``torch.compile`` is specialized for the choice in effect when it is called, and is
    recompiled for a different choice. The context manager can also be entered inside a compiled function.

    Args:
        name: "auto", "reference" or the name of an implementation.

    Example::

        >>> with interlayer.backend("reference"):
        ...     logits = model(images)
    """
    return choose(_checked(name, "backend"))


def choose_from_environment() -> None:
    """Applies INTERLAYER_BACKEND. Called once, after all operations have been defined."""
    set_default(_checked(os.environ.get("INTERLAYER_BACKEND") or AUTO, "INTERLAYER_BACKEND"))
