"""Named models, registered with timm, and their checkpoints."""

from .checkpoints import CheckpointError, convert_checkpoint, load_weights, save_weights
from .registry import backbone_of, check_name, list_models

__all__ = [
    "CheckpointError",
    "backbone_of",
    "check_name",
    "convert_checkpoint",
    "list_models",
    "load_weights",
    "save_weights",
]
