"""Models that this library registers with timm: named models in `rows/` and networks in `networks/`."""

from difflib import get_close_matches
from fnmatch import fnmatchcase

import timm

from .networks import NETWORKS
from .rows import ROWS


def list_models(pattern: str = "*") -> list[str]:
    """Lists the models that this library registers with timm and that match a shell-style pattern.

    >>> interlayer.list_models("resnet101_m*")
    ['resnet101_mrla_base', 'resnet101_mrla_light']
    """
    return sorted(name for name in (*ROWS, *NETWORKS) if fnmatchcase(name, pattern))


def check_name(name: str) -> None:
    """Raises a ValueError that lists similar names if timm does not know a name, NAME or NAME.TAG."""
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        near = get_close_matches(architecture, timm.list_models(), n=3)
        raise ValueError(f"unknown model {name!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
    if tag and name not in timm.list_models(f"{architecture}.*", pretrained=True):
        raise ValueError(f"unknown weights {tag!r} of {architecture!r}")


def backbone_of(name: str) -> str:
    """Returns the backbone that the named model extends, or the name itself if it extends none."""
    return ROWS[name].backbone if name in ROWS else name
