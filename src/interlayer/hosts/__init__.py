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
from .stages import AttachError, find_stages

__all__ = [
    "MECHANISMS",
    "AttachError",
    "LoadReport",
    "attach",
    "attached_blocks",
    "attached_mechanisms",
    "detach",
    "find_stages",
    "load_backbone",
]
