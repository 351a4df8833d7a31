"""The network that is exported or stored: that of a finished run, or a model by its name with trained weights."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..models.build import build_network
from ..models.checkpoints import read_checkpoint, unwrap
from ..models.hub import is_stored
from ..tasks.task import NETWORK_KEYS
from ..training import Recipe, TrainingError, load_recipe
from ..training.data import ImageTransform
from .trained import TrainedNetwork

KEYS = ("weights", "pretrained", "num_classes", "image_size", "model_options", "attach_options")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceNetwork:
    """A network on the CPU in eval mode, and what is needed to apply it to images.

    Args:
        recipe: the recipe of the run, or one that describes only the network and its images.
        network: the network.
        transform: the transform of an image to the network's input.
        classes: the names of the classes, by label; empty if they are not known.
        summary: the contents of summary.json; empty if the network does not come from a run.
    """

    recipe: Recipe
    network: nn.Module
    transform: ImageTransform
    classes: list[str]
    summary: Mapping[str, Any] = field(default_factory=dict)


def source_network(source: str, overrides: Sequence[str] = ()) -> SourceNetwork:
    """Loads the network of a run if ``source`` is its folder, and otherwise the model of this name.

    Args:
        source: the folder of a run, or a name that `build_network` accepts.
        overrides: "weights=FILE" for other weights, and for a model also "pretrained=true", "num_classes=10",
            "image_size=64" and options of the model and its mechanism.
    """
    given = {override.partition("=")[0].strip().split(".")[0] for override in overrides}
    for key in sorted(given.difference(KEYS)):
        raise TrainingError(f"{key} has no effect here; the options are: {', '.join(KEYS)}")
    recipe = load_recipe("default", overrides, model=source)
    if not is_stored(source) and ("/" in source or Path(source).is_dir()):
        for key in sorted(given.difference({"weights"})):
            raise TrainingError(f"{key} is fixed in a run; the only option is weights=FILE")
        if not Path(source).is_dir():
            raise TrainingError(f"{source}: no such folder")
        weights = Path(recipe.weights) if recipe.weights else None
        run = TrainedNetwork(Path(source), weights, device=torch.device("cpu"))
        summary = _read_summary(Path(source))
        return SourceNetwork(run.recipe, run.network, run.transform, run.task.classes, summary)
    return _named_network(recipe)


def _read_summary(folder: Path) -> dict[str, Any]:
    from ..training.summary import read_summary

    return read_summary(folder)


def _named_network(recipe: Recipe) -> SourceNetwork:
    if is_stored(recipe.model) and not recipe.weights:
        recipe = recipe.replace(pretrained=True)
    if not recipe.pretrained and not recipe.weights:
        logger.warning(f"{recipe.model} has random weights: give weights=FILE or pretrained=true")
    if recipe.weights and recipe.num_classes is None:
        recipe = recipe.replace(num_classes=_num_classes(recipe))
    values = dataclasses.asdict(recipe)
    options = {key: values[key] for key in NETWORK_KEYS}
    network: Any = build_network(recipe.model, num_classes=recipe.num_classes, **options).eval()
    names = network.pretrained_cfg.get("label_names") or []
    classes = list(names.values() if isinstance(names, dict) else names)
    return SourceNetwork(recipe, network, ImageTransform.of(network, recipe), [str(name) for name in classes])


def _num_classes(recipe: Recipe) -> int | None:
    """Returns the number of classes of a weights file; None if it has no classifier."""
    assert recipe.weights is not None
    tensors = unwrap(read_checkpoint(recipe.weights)[0])
    with torch.device("meta"):
        network: Any = build_network(recipe.model, model_options=recipe.model_options)
    classifier = network.pretrained_cfg["classifier"]
    first = classifier[0] if isinstance(classifier, (tuple, list)) else classifier
    head = tensors.get(f"{first}.weight", tensors.get(f"{first}.1.weight"))
    return None if head is None else len(head)
