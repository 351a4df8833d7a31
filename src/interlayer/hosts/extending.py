"""Adds methods to a module without changing the names of its parameters.

`extend` replaces the class of a module by a subclass that it creates, so `isinstance` still holds. Each such class is
created once per extended class, and is pickled as the original class and the mixins that were added to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import nn


class Extended:
    """Base class of the mixins that `extend` adds to a class."""

    _mixin: type
    _extended: type
    class_prefix = "Attached"  # of the name of the extended class, so that print(model) shows which modules changed

    @staticmethod
    def methods(base: Any) -> dict[str, Any]:
        """Returns the methods that depend on the class that is extended."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        return (_new_extended, (_mixins(type(self)), original_class(self)), *reduced[2:])


@cache
def _extended_class(mixin: Any, base: Any) -> Any:
    namespace = {"_mixin": mixin, "_extended": base, "__module__": base.__module__, "__doc__": base.__doc__}
    # The qualified name stays: transformers looks up by str(class) what a class can return.
    namespace["__qualname__"] = base.__qualname__
    name = f"{mixin.class_prefix}{base.__name__.removeprefix(mixin.class_prefix)}"
    return type(name, (mixin, base), namespace | mixin.methods(base))


def _new_extended(mixins: Sequence[type], base: type) -> Any:
    cls = _class_with(mixins, base)
    return cls.__new__(cls)


def _mixins(cls: Any) -> tuple[type, ...]:
    """Returns the mixins of a class, in the order in which they were added."""
    mixins: list[type] = []
    while issubclass(cls, Extended):
        mixins.append(cls._mixin)
        cls = cls._extended
    return tuple(reversed(mixins))


def _class_with(mixins: Sequence[type], base: type) -> Any:
    for mixin in mixins:
        base = _extended_class(mixin, base)
    return base


def extend(module: nn.Module, mixin: type) -> None:
    """Add the methods of `mixin` to `module`, unless it has them already."""
    if not isinstance(module, mixin):
        base: Any = type(module)
        module.__class__ = _extended_class(mixin, base)


def restore(module: nn.Module, mixin: type) -> None:
    """Undo `extend` with this mixin. Other mixins of the module are kept."""
    kept = [each for each in _mixins(type(module)) if each is not mixin]
    module.__class__ = _class_with(kept, original_class(module))


def original_class(module: object) -> type:
    """Returns the class that a module had before any mixin was added."""
    cls: Any = type(module)
    while issubclass(cls, Extended):
        cls = cls._extended
    return cls
