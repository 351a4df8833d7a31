"""Which implementation of an operation runs.

Every operation has a reference in plain PyTorch, which defines what it computes, and may have faster implementations.
They are listed at the foot of the operation's file, in the order in which they are tried. Each one states its limits in
one predicate, `unsupported_reason`. Under "auto" the first implementation that supports the arguments runs, and the
reference runs if there is none. Choosing an implementation by name runs that one or raises an error with the reason.
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

# The one reason for which an implementation chosen by name is skipped instead of raising an error.
TRACED = "the operators called here are traced or transformed, which the kernel does not support"


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Args:
        name: The name that `backend` accepts.
        function: The function that computes the operation. It has the signature of the reference.
        unsupported_reason: A function with the same signature that returns why the arguments are not supported, or
            None if they are.
        strict: Whether choosing the implementation by name raises an error for arguments that it does not support.
    """

    name: str
    function: Callable[..., Any]
    unsupported_reason: Predicate
    strict: bool = True


def triton_implementation(file: str, function: str | None = None, *, strict: bool = True) -> list[Implementation]:
    """The kernel in `ops/_triton/<file>.py`, or an empty list on a platform without Triton.

    Args:
        file: The file's name, which is that of the operation's file.
        function: The name of the function in that file; the file's own name by default.
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
        reference: The function that defines what the operation computes.
        implementations: The others, in the order in which they are tried.
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
    """The operation `name`, for the backward pass of one of its own implementations, which cannot import it."""
    return _OPERATIONS[name]


def is_chosen(name: str) -> bool:
    """Whether the implementation `name` was chosen by name."""
    return current() == name


def backends() -> list[str]:
    """The names that `backend` accepts: "auto", "reference" and those of all implementations."""
    names = {i.name for operation in _OPERATIONS.values() for i in operation.implementations}
    return [AUTO, REFERENCE, *sorted(names)]


def _checked(name: str, source: str) -> str:
    if name not in backends():
        raise ValueError(f"{source}: unknown backend {name!r}, expected one of {', '.join(backends())}")
    return name


def backend(name: str) -> AbstractContextManager[None]:
    """Context manager that runs every operation called inside it on the implementation `name`.

    An operation that has no implementation of that name runs its reference.

    The choice holds for the thread or asyncio task that entered the context manager. A thread that is started inside it
    does not inherit the choice; a task does, as it inherits every context variable. The environment variable
    INTERLAYER_BACKEND sets the choice for all threads and tasks of a process that have made none.

    A function compiled by ``torch.compile`` is specialized for the choice in effect when it is called, and is
    recompiled for another one. The context manager can be entered inside of a compiled function too.

    The backward pass of a GPU runs in a thread of autograd's own. Operations that run there, such as the recomputation
    of a forward pass under gradient checkpointing, use the choice of the thread or task that called ``backward()``:
    enter the same backend around the forward and the backward pass. Versions of torch that do not hand their context
    to that thread, such as 2.11, use the choice that was made last in the process; set INTERLAYER_BACKEND there if
    several threads choose different backends and train at the same time.

    Args:
        name: "auto", "reference" or the name of an implementation.

    Example::

        >>> with interlayer.backend("reference"):
        ...     logits = model(images)
    """
    return choose(_checked(name, "backend"))


def choose_from_environment() -> None:
    """Apply INTERLAYER_BACKEND. Called once, after all operations have been defined."""
    set_default(_checked(os.environ.get("INTERLAYER_BACKEND") or AUTO, "INTERLAYER_BACKEND"))
