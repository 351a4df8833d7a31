"""How a mechanism gets into a network."""

from .attach import (
    MECHANISMS,
    LoadReport,
    as_wide_as,
    attach,
    attached_blocks,
    attached_mechanisms,
    detach,
    load_backbone,
    options_of,
)
from .probe import AttachError, evaluating, probe_image
from .stages import find_stages

__all__ = [
    "MECHANISMS",
    "AttachError",
    "LoadReport",
    "as_wide_as",
    "attach",
    "attached_blocks",
    "attached_mechanisms",
    "detach",
    "evaluating",
    "find_stages",
    "load_backbone",
    "options_of",
    "probe_image",
]
