"""Models by name, with an error that helps where there is none of that name."""

from contextlib import suppress
from difflib import get_close_matches
from typing import Any


def create(name: str, **options: Any) -> Any:
    """`timm.create_model`, with the nearest names in the error for an unknown one."""
    import timm

    import interlayer  # noqa: F401  registers its models

    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        near = get_close_matches(architecture, timm.list_models(), n=3)
        raise ValueError(f"unknown model {name!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
    if tag and name not in timm.list_models(f"{architecture}.*", pretrained=True):
        raise ValueError(f"unknown weights {tag!r} of {architecture!r}")
    try:
        return timm.create_model(name, **options)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{name} cannot be built with {', '.join(options) or 'its defaults'}: {error}") from error


def create_at_size(name: str, image_size: int | None) -> Any:
    """The model for images of that size: models that are built for one size are built for this one."""
    if image_size is not None:
        with suppress(ValueError):
            return create(name, img_size=image_size)
    return create(name)
