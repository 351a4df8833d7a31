"""Which models this library registers with timm, and what each one extends."""

from difflib import get_close_matches
from fnmatch import fnmatchcase

import timm

from . import cb, ceit, densenet, halonet, mrla, preresnet, rest, rla, xception  # noqa: F401  cb, mrla, rla fill ROWS
from .rows import ROWS

NETWORKS = {
    name: config
    for module in (ceit, preresnet, xception, densenet, halonet, rest)
    for name, config in module.default_cfgs.items()
}


def list_models(pattern: str = "*") -> list[str]:
    """Names of the models this library registers with timm that match a shell-style pattern.

    >>> interlayer.list_models("resnet101_m*")
    ['resnet101_mrla_base', 'resnet101_mrla_light']
    """
    return sorted(name for name in (*ROWS, *NETWORKS) if fnmatchcase(name, pattern))


def check_name(name: str) -> None:
    """Refuse a name, NAME or NAME.TAG, that timm does not know, with the nearest ones."""
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        near = get_close_matches(architecture, timm.list_models(), n=3)
        raise ValueError(f"unknown model {name!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
    if tag and name not in timm.list_models(f"{architecture}.*", pretrained=True):
        raise ValueError(f"unknown weights {tag!r} of {architecture!r}")


def backbone_of(name: str) -> str:
    """The plain timm model that the named model extends; the name itself where it extends none."""
    return ROWS[name].backbone if name in ROWS else name
