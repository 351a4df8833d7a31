"""Which implementation of an operation runs.

Every operation has a reference in plain PyTorch, which defines what it means, and may have faster implementations
beside it. Each states its limits in one predicate. Under "auto" the first implementation without an objection runs;
asking for one by name runs that one or says why it cannot.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

AUTO = "auto"
REFERENCE = "reference"

Predicate = Callable[..., str | None]


# The one objection for which even a call by name goes on to the next implementation.
WATCHED = "where operators are watched, torch's own are seen through"


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation. `objection(*args, **kwargs)` says why it cannot, or returns None."""

    name: str
    function: Callable[..., Any]
    objection: Predicate
    insists: bool = True  # whether a call by name that it objects to is an error


class Operation:
    """A function on tensors with one or more implementations, tried last added first, reference last."""

    def __init__(self, reference: Callable[..., Any], name: str | None = None) -> None:
        self.__name__ = name or reference.__name__
        self.__doc__ = reference.__doc__
        self.reference = reference
        self.kernels: list[Implementation] = []
        _OPERATIONS[self.__name__] = self

    def kernel(
        self, name: str, objection: Predicate, *, insists: bool = True
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: add `function` as the implementation `name`, used where `objection` returns None."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            self.kernels.insert(0, Implementation(name, function, objection, insists))
            return function

        return add

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wanted = _choice.name
        if wanted == REFERENCE or not self.kernels:
            return self.reference(*args, **kwargs)
        for kernel in self.kernels:
            if wanted not in (AUTO, kernel.name):
                continue
            objection = kernel.objection(*args, **kwargs)
            if objection is None:
                return kernel.function(*args, **kwargs)
            if wanted != AUTO and kernel.insists and objection != WATCHED:
                raise ValueError(f"backend {wanted!r} cannot compute {self.__name__}: {objection}")
        return self.reference(*args, **kwargs)


class _Choice:
    name: str = AUTO


_OPERATIONS: dict[str, Operation] = {}
_choice = _Choice()


def asked_for(name: str) -> bool:
    """Whether an implementation was asked for by name."""
    return _choice.name == name


def backends() -> list[str]:
    """The names `backend` accepts: "auto", "reference" and every implementation that has been added."""
    kernels = {kernel.name for operation in _OPERATIONS.values() for kernel in operation.kernels}
    return [AUTO, REFERENCE, *sorted(kernels)]


def _checked(name: str, source: str) -> str:
    if name not in backends():
        raise ValueError(f"{source}: unknown backend {name!r}, expected one of {', '.join(backends())}")
    return name


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Run every operation called inside the `with` block on the implementation `name`.

    The environment variable INTERLAYER_BACKEND sets the choice for a whole process. An operation that has no
    implementation of that name runs its reference.

    >>> with interlayer.backend("reference"):
    ...     logits = model(images)
    """
    before = _choice.name
    _choice.name = _checked(name, "backend")
    try:
        yield
    finally:
        _choice.name = before


def choose_from_environment() -> None:
    """Apply INTERLAYER_BACKEND. Called once, after every operation has been defined."""
    _choice.name = _checked(os.environ.get("INTERLAYER_BACKEND") or AUTO, "INTERLAYER_BACKEND")
