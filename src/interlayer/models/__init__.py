"""Named models: construction, loading of weights, and conversion of published checkpoints."""

from .build import ModelError, build_network
from .checkpoints import CheckpointError, save_weights
from .published import convert_checkpoint
from .registry import backbone_of, check_name, list_models
from .weights import LoadReport, load_backbone, load_weights

__all__ = [
    "CheckpointError",
    "LoadReport",
    "ModelError",
    "backbone_of",
    "build_network",
    "check_name",
    "convert_checkpoint",
    "list_models",
    "load_backbone",
    "load_weights",
    "save_weights",
]
