"""Options as data: one frozen record per mechanism, from which checks, errors, help and documentation follow.

A record is a frozen dataclass whose fields are made by `option`. `parse` turns what a user gave into a record or raises
one sentence that names the option and what was expected; `describe` lists the options with their defaults and meaning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

Reading = Literal["paper", "published"]
Init = Literal["paper", "identity"]
Check = Callable[[str, Any], None]


class OptionError(ValueError, TypeError):
    """An option that a mechanism does not have, or a value that it does not take."""


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The record of a mechanism without options."""


Record = TypeVar("Record")


def option(default: Any, meaning: str, *, check: Check | None = None, shown: str | None = None) -> Any:
    """A field of a record.

    Args:
        default: its value unless given. None stands for what the mechanism or its host chooses.
        meaning: one line for help and documentation.
        check: called with the option's name and a value that was given; raises `OptionError`.
        shown: the default in words, where the value alone does not tell.
    """
    return dataclasses.field(default=default, metadata={"meaning": meaning, "check": check, "shown": shown})


def parse(record: type[Record], owner: str, given: Mapping[str, Any]) -> Record:
    """The record of what was given, checked.

    Args:
        record: the dataclass.
        owner: the mechanism's name, for messages.
        given: options by name.
    """
    fields = {field.name: field for field in dataclasses.fields(record)}  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in fields:
            expected = f"expected one of {', '.join(fields)}" if fields else "it has none"
            raise OptionError(f"{owner} has no option {name!r}, {expected}")
        check = fields[name].metadata.get("check")
        if check is not None and not (value is None and fields[name].default is None):
            check(name, value)
    return record(**given)


@dataclasses.dataclass(frozen=True)
class OptionDescription:
    """One option, for help and documentation."""

    name: str
    default: str
    meaning: str


def describe(record: type[Any]) -> list[OptionDescription]:
    """The options of a record, in order."""
    return [
        OptionDescription(field.name, field.metadata["shown"] or _shown(field.default), field.metadata["meaning"])
        for field in dataclasses.fields(record)
    ]


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def values_of(record: Any, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """A record's values by name, for a constructor that takes options of these names."""
    return {
        field.name: getattr(record, field.name) for field in dataclasses.fields(record) if field.name not in without
    }


# Checks. Each is used by records and by the modules that take the same options.


def expect_choice(name: str, value: Any, valid: Sequence[str]) -> None:
    """Refuse a value that is not one of `valid`."""
    if value not in valid:
        raise OptionError(f"{name} must be {' or '.join(map(repr, valid))}, got {value!r}")


def expect_flag(name: str, value: Any) -> None:
    """Refuse a value that is not a bool."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be true or false, got {value!r}")


def expect_whole(name: str, value: Any) -> None:
    """Refuse a value that is not an int."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise OptionError(f"{name} must be a whole number, got {value!r}")


def expect_positive(name: str, value: Any) -> None:
    """Refuse a value that is not an int of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(f"{name} must be a whole number of at least 1, got {value!r}")


def one_of(*valid: str) -> Check:
    """The check that a value is one of `valid`."""
    return lambda name, value: expect_choice(name, value, valid)
