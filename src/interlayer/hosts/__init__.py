"""How a mechanism gets into a network."""

from .attach import (
    MECHANISMS,
    as_wide_as,
    attach,
    attached_blocks,
    attached_mechanisms,
    detach,
    options_of,
)
from .probe import AttachError, evaluating, probe_image
from .replace import hand_to_replaced, names_of_replaced
from .stages import find_stages

__all__ = [
    "MECHANISMS",
    "AttachError",
    "as_wide_as",
    "attach",
    "attached_blocks",
    "attached_mechanisms",
    "detach",
    "evaluating",
    "find_stages",
    "hand_to_replaced",
    "names_of_replaced",
    "options_of",
    "probe_image",
]
