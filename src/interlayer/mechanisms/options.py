"""Options of mechanisms as frozen dataclasses, which define the checks, error messages, help and documentation.

The fields of such a dataclass, here called a record, are created by `option`. `parse` checks the given options and
returns a record, or raises an error that names the option and the expected values. `describe` lists the options with
their defaults and meaning.

A `Control` is a row of options too: the mechanism without what it is credited with, to be compared with it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

Reading = Literal["paper", "published"]
Init = Literal["paper", "identity"]
Check = Callable[[str, Any], None]


class OptionError(ValueError, TypeError):
    """An option that a mechanism does not have, or an invalid value of an option."""


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The record of a mechanism without options."""


Record = TypeVar("Record")


def option(default: Any, meaning: str, *, check: Check | None = None, shown: str | None = None) -> Any:
    """Create a field of a record.

    Args:
        default: the default value. None means that the mechanism or the network determines the value.
        meaning: a description in one line, for help and documentation.
        check: a function that is called with the name of the option and a given value. It raises `OptionError`.
        shown: a description of the default, if the value is not self-explanatory.
    """
    return dataclasses.field(default=default, metadata={"meaning": meaning, "check": check, "shown": shown})


def parse(record: type[Record], owner: str, given: Mapping[str, Any]) -> Record:
    """Check the given options and return them as a record.

    Args:
        record: the dataclass.
        owner: the name of the mechanism, for messages.
        given: options by name.
    """
    fields = {field.name: field for field in dataclasses.fields(record)}  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in fields:
            raise OptionError(f"{owner} has no option {name!r}" + (_suggestion(name, fields) or ", it has none"))
        check = fields[name].metadata.get("check")
        if check is not None and not (value is None and fields[name].default is None):
            check(name, value)
    return record(**given)


def unknown(what: str, name: Any, valid: Iterable[str]) -> str:
    """Returns the message for a name that is not valid. It lists the valid names, the nearest ones first.

    >>> unknown("mechanism", "mrla_lite", ["cb", "mrla_light"])
    "unknown mechanism 'mrla_lite', did you mean mrla_light? Expected one of mrla_light, cb"
    """
    return f"unknown {what} {name!r}" + _suggestion(str(name), valid)


def _suggestion(name: str, valid: Iterable[str]) -> str:
    names = list(valid)
    if not names:
        return ""
    begins = [other for other in names if len(name) > 2 and other.startswith(name)]
    near = [*begins, *difflib.get_close_matches(name, names, n=3, cutoff=0.6)]
    listed = ", ".join(dict.fromkeys([*near, *names]))
    return f", did you mean {near[0]}? Expected one of {listed}" if near else f", expected one of {listed}"


@dataclasses.dataclass(frozen=True)
class OptionDescription:
    """One option, for help and documentation."""

    name: str
    default: str
    meaning: str


def describe(record: type[Any]) -> list[OptionDescription]:
    """Returns the options of a record, in order."""
    return [
        OptionDescription(field.name, field.metadata["shown"] or _shown(field.default), field.metadata["meaning"])
        for field in dataclasses.fields(record)
    ]


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


@dataclasses.dataclass(frozen=True)
class Control:
    """A control of a mechanism: the same mechanism without what it is credited with.

    A gain over the plain network that the control has as well does not come from what is tested.

    Args:
        options: the options that make the mechanism its control.
        left: what is left of the mechanism, in a few words.
        tested: what the mechanism does and its control does not, in a few words.
        without: options that mean nothing in the control, and have their defaults there.
        unless: values of options for which there is no such control: the mechanism does not do what is tested, or
            nothing would be left of it.
        in_classifier: whether only a classifier reads what is left, so that under a detector or segmenter the control
            is the plain network.

    >>> Control({"memory": False}, left="no memory", tested="reading the memory").options_for({"memory": True, "k": 3})
    {'k': 3, 'memory': False}
    """

    options: Mapping[str, Any]
    left: str
    tested: str
    without: tuple[str, ...] = ()
    unless: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    in_classifier: bool = False

    def options_for(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the options of the control of a mechanism with these options, or None if it has none."""
        if any(
            given.get(name, dataclasses.MISSING) == value for name, value in {**self.options, **self.unless}.items()
        ):
            return None
        replaced = (*self.options, *self.without)
        return {**{name: value for name, value in given.items() if name not in replaced}, **self.options}


def values_of(record: Any, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the values of a record by name, for a constructor with arguments of these names."""
    return {
        field.name: getattr(record, field.name) for field in dataclasses.fields(record) if field.name not in without
    }


# Checks, used by records and by modules with the same options.


def expect_choice(name: str, value: Any, valid: Sequence[str]) -> None:
    """Raise an error if `value` is not one of `valid`."""
    if value not in valid:
        raise OptionError(f"{name} must be {' or '.join(map(repr, valid))}, got {value!r}")


def expect_flag(name: str, value: Any) -> None:
    """Raise an error if `value` is not a bool."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be true or false, got {value!r}")


def expect_whole(name: str, value: Any) -> None:
    """Raise an error if `value` is not an int."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise OptionError(f"{name} must be a whole number, got {value!r}")


def expect_number(name: str, value: Any) -> None:
    """Raise an error if `value` is not a finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise OptionError(f"{name} must be a number, got {value!r}")


def expect_positive(name: str, value: Any) -> None:
    """Raise an error if `value` is not an int of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(f"{name} must be a whole number of at least 1, got {value!r}")


def expect_rate(name: str, value: Any) -> None:
    """Raise an error if `value` is not a probability below 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise OptionError(f"{name} must be a probability below 1, got {value!r}")


def expect_odd(name: str, value: Any) -> None:
    """Raise an error if `value` is not an odd int of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value % 2 == 0:
        raise OptionError(f"{name} must be an odd whole number of at least 1, got {value!r}")


def one_of(*valid: str) -> Check:
    """Returns a check that a value is one of `valid`."""
    return lambda name, value: expect_choice(name, value, valid)
