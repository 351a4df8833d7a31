"""The papers' ideas as modules, one file an idea."""

from .description import description_differences
from .mrla import MLA, LayerAttention, MRLABase, MRLALight, MRLALinear
from .rla import RLA

__all__ = ["MLA", "RLA", "LayerAttention", "MRLABase", "MRLALight", "MRLALinear", "description_differences"]
