"""Models by name, with an error that helps where there is none of that name."""

from contextlib import suppress
from typing import Any


def create(name: str, **options: Any) -> Any:
    """`timm.create_model`, with the nearest names in the error for an unknown one."""
    import timm

    from interlayer.models import check_name

    check_name(name)
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
