"""How a mechanism gets into a network."""

from .attach import (
    MECHANISMS,
    LoadReport,
    attach,
    attached_blocks,
    attached_mechanisms,
    detach,
    load_backbone,
)
from .probe import AttachError, evaluating, probe_image
from .stages import find_stages

__all__ = [
    "MECHANISMS",
    "AttachError",
    "LoadReport",
    "attach",
    "attached_blocks",
    "attached_mechanisms",
    "detach",
    "evaluating",
    "find_stages",
    "load_backbone",
    "probe_image",
]
