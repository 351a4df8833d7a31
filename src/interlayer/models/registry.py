"""Which models this library registers with timm, and what each one extends."""

from fnmatch import fnmatchcase

from . import ceit, preresnet
from .mrla import ROWS


def list_models(pattern: str = "*") -> list[str]:
    """Names of the models this library registers with timm that match a shell-style pattern.

    >>> interlayer.list_models("resnet50_*")
    ['resnet50_mla', 'resnet50_mrla_base', 'resnet50_mrla_light', 'resnet50_mrla_linear']
    """
    return sorted(name for name in (*ROWS, *ceit.default_cfgs, *preresnet.default_cfgs) if fnmatchcase(name, pattern))


def backbone_of(name: str) -> str:
    """The plain timm model that the named model extends; the name itself where it extends none."""
    return ROWS[name].backbone if name in ROWS else name
