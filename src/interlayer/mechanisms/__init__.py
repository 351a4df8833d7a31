"""The mechanisms of the papers as modules, one file per mechanism."""

from .broadcast import ContextBroadcast, UniformHeadAttention, fit_uniform_heads
from .description import description_differences, fit_flags, fitted_flags
from .emsa import EfficientAttention, PixelAttention
from .gates import fit_gate_factors, fitted_gates
from .halo import HaloAttention2d, fit_halo_tables, resize_halo
from .layer_attention import LayerAttention
from .mrla import MLA, MRLABase, MRLALight, MRLALinear
from .protocol import BlockMechanism, BlockValues, Place
from .rla import RLA

__all__ = [
    "MLA",
    "RLA",
    "BlockMechanism",
    "BlockValues",
    "ContextBroadcast",
    "EfficientAttention",
    "HaloAttention2d",
    "LayerAttention",
    "MRLABase",
    "MRLALight",
    "MRLALinear",
    "PixelAttention",
    "Place",
    "UniformHeadAttention",
    "description_differences",
    "fit_flags",
    "fit_gate_factors",
    "fit_halo_tables",
    "fit_uniform_heads",
    "fitted_flags",
    "fitted_gates",
    "resize_halo",
]
