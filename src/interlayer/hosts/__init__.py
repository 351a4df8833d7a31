"""Attaches mechanisms to networks."""

from ..mechanisms.options import Control
from .attach import (
    MECHANISMS,
    Kind,
    Mechanism,
    accepts_option,
    as_wide_as,
    attach,
    attached_blocks,
    attached_mechanisms,
    controls_of,
    detach,
    kind_in_blocks,
    options_of,
    register_mechanism,
)
from .block import entry_of
from .finding.blocks import find_stages
from .finding.probe import AttachError, evaluating, probe_image
from .placing.blocks import place_in_stage
from .placing.replaced import hand_to_replaced, names_of_replaced
from .switch import switched_off

__all__ = [
    "MECHANISMS",
    "AttachError",
    "Control",
    "Kind",
    "Mechanism",
    "accepts_option",
    "as_wide_as",
    "attach",
    "attached_blocks",
    "attached_mechanisms",
    "controls_of",
    "detach",
    "entry_of",
    "evaluating",
    "find_stages",
    "hand_to_replaced",
    "kind_in_blocks",
    "names_of_replaced",
    "options_of",
    "place_in_stage",
    "probe_image",
    "register_mechanism",
    "switched_off",
]
