"""Models by name, with an error that helps where there is none of that name."""

from difflib import get_close_matches
from typing import Any


def create(name: str, **options: Any) -> Any:
    """`timm.create_model`, with the nearest names in the error for an unknown one."""
    import timm

    import interlayer  # noqa: F401  registers its models

    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=3)
        raise ValueError(f"unknown model {name!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
    try:
        return timm.create_model(name, **options)
    except TypeError as error:
        raise ValueError(f"{name} cannot be built with {', '.join(options)}: {error}") from error
