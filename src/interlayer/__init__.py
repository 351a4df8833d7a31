"""interlayer: cross-layer attention for vision backbones.

Importing it registers the library's models with timm, so `timm.create_model("resnet50_mrla_light")` works.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from .analysis import (
    Contribution,
    attention_entropy,
    attention_maps,
    class_activation,
    contribution,
    layer_scores,
    plot_attention_entropy,
    plot_class_activation,
    plot_layer_scores,
    plot_query_attention,
    query_attention,
)
from .hosts import AttachError, attach, detach, switched_off
from .mechanisms import resize_halo
from .models import CheckpointError, convert_checkpoint, list_models, load_backbone, load_weights, save_weights
from .ops import backend

if TYPE_CHECKING:
    from .experiments.export import ExportError, export_model
    from .experiments.hub import push_to_hub, save_for_hub
    from .experiments.trained import load_run
    from .models.dense import detector, segmenter

_LAZY = {  # imported when they are first used, because they import the trainer or torchvision's detectors
    "ExportError": ".experiments.export",
    "detector": ".models.dense",
    "export_model": ".experiments.export",
    "load_run": ".experiments.trained",
    "push_to_hub": ".experiments.hub",
    "save_for_hub": ".experiments.hub",
    "segmenter": ".models.dense",
}

try:
    __version__ = version("interlayer")
except PackageNotFoundError:  # run from source, not installed
    __version__ = "0.1.0"

__all__ = [
    "AttachError",
    "CheckpointError",
    "Contribution",
    "ExportError",
    "attach",
    "attention_entropy",
    "attention_maps",
    "backend",
    "class_activation",
    "contribution",
    "convert_checkpoint",
    "detach",
    "detector",
    "export_model",
    "layer_scores",
    "list_models",
    "load_backbone",
    "load_run",
    "load_weights",
    "plot_attention_entropy",
    "plot_class_activation",
    "plot_layer_scores",
    "plot_query_attention",
    "push_to_hub",
    "query_attention",
    "resize_halo",
    "save_for_hub",
    "save_weights",
    "segmenter",
    "switched_off",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
