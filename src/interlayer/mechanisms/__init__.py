"""The papers' ideas as modules, one file an idea."""

from .mrla import MLA, LayerAttention, MRLABase, MRLALight, MRLALinear, description_differences

__all__ = ["MLA", "LayerAttention", "MRLABase", "MRLALight", "MRLALinear", "description_differences"]
