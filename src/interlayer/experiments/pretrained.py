"""Networks with trained weights that do not come from a run: pretrained weights of timm, or a weights file."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from ..models.build import ModelError, build_network, split_name
from ..models.checkpoints import read_checkpoint, unwrap
from ..models.hub import is_stored
from ..models.origin import changes_outputs, origin_of
from ..models.registry import check_name
from ..models.weights import classifier_names, classifier_parameters, start_from
from ..training import Recipe, TrainingError, load_recipe
from ..training.data import ClassNames, ImageTransform
from .trained import (
    LOADING_KEYS,
    TRANSFORM_KEYS,
    LoadedNetwork,
    TrainedNetwork,
    check_image_size,
    check_overrides,
    replaced_transform,
    task_of,
)

MODEL_KEYS = ("weights", "pretrained", "model_options", "attach_options")
logger = logging.getLogger(__name__)


class PretrainedNetwork(LoadedNetwork):
    """A network with trained weights that does not come from a run, in eval mode.

    The transform of its images is timm's for this network. The number of its classes is that of the weights; the names
    of ImageNet's classes are known.

    Args:
        model: name of a timm model, or NAME+MECHANISM. A mechanism that the weights do not contain starts as the
            identity, if it can.
        overrides: the weights, as "weights=FILE" or "pretrained=true", and values that change how the network is built
            and how images are loaded and transformed, such as "image_size=288".
        device: the device of the network; a GPU if available, if None.
        untrained: whether a network without weights is built, with random ones, instead of raising an error.
    """

    def __init__(
        self,
        model: str,
        overrides: Sequence[str] = (),
        *,
        device: torch.device | None = None,
        untrained: bool = False,
    ) -> None:
        recipe = load_recipe("default", overrides, model=model)
        if is_stored(model) and not recipe.weights:  # it has its own weights
            recipe = recipe.replace(pretrained=True)
        given = check_overrides(overrides, (*MODEL_KEYS, *TRANSFORM_KEYS, *LOADING_KEYS))
        self.has_weights = bool(recipe.pretrained or recipe.weights)
        if not self.has_weights and not untrained:
            raise TrainingError(
                f"{model} has no trained weights: give weights=FILE, or pretrained=true for those that timm provides"
            )
        network = _build(recipe)
        class_names = _class_names(network)
        names = class_names.names if class_names else [str(label) for label in range(_num_classes(network))]
        config = timm.data.resolve_model_data_config(network)
        transform = ImageTransform(
            config["input_size"][-1], tuple(config["mean"]), tuple(config["std"]), config["interpolation"],
            config["crop_pct"], config["crop_mode"],
        )  # fmt: skip
        transform = replaced_transform(transform, recipe, given)
        check_image_size(network, model, transform.size)
        if self.has_weights:
            _warn_if_untrained(network, recipe, transform.size)
        recipe = recipe.replace(num_classes=len(names))
        super().__init__(recipe, task_of(recipe, names), network, transform, class_names=class_names, device=device)


def load_network(
    name: str,
    overrides: Sequence[str] = (),
    *,
    weights: Path | None = None,
    device: torch.device | None = None,
    untrained: bool = False,
) -> LoadedNetwork:
    """Loads the network of a run if ``name`` is its folder, and otherwise the model of this name.

    Args:
        name: the folder of a run, or a model as in `PretrainedNetwork`.
        overrides: ``key=value`` strings, see `TrainedNetwork` and `PretrainedNetwork`.
        weights: a weights file; instead of it, "weights=FILE" can be among the overrides.
        device: the device of the network; the one that the overrides name if None, or a GPU if available.
        untrained: whether a model without weights is built, with random ones, instead of raising an error.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        files = [text.partition("=")[2] for text in overrides if text.startswith("weights=")]
        others = [text for text in overrides if not text.startswith("weights=")]
        return TrainedNetwork(folder, weights or (Path(files[-1]) if files else None), device=device, overrides=others)
    try:
        if not is_stored(name):
            check_name(split_name(name)[0])
    except ValueError as error:
        raise TrainingError(f"{name}: no such folder of a run, and {error}") from error
    files = [f"weights={weights}"] if weights else []
    return PretrainedNetwork(name, [*overrides, *files], device=device, untrained=untrained)


def _build(recipe: Recipe) -> nn.Module:
    """Builds the network with as many classes as its weights have."""
    options: dict[str, Any] = {
        "image_size": recipe.image_size, "model_options": recipe.model_options, "attach_options": recipe.attach_options,
    }  # fmt: skip
    try:
        if not recipe.weights and not recipe.pretrained:
            return build_network(recipe.model, **options)
        if not recipe.weights:
            network = build_network(recipe.model, pretrained=True, **options)
            if not _num_classes(network):
                raise TrainingError(f"the pretrained weights of {recipe.model} have no classifier")
            return network
        classes = _classes_in(recipe.weights, build_network(recipe.model, **options))
        return build_network(recipe.model, weights=recipe.weights, num_classes=classes, **options)
    except ModelError as error:
        raise TrainingError(str(error)) from error


def _classes_in(path: str, network: nn.Module) -> int:
    """Returns the number of classes of the classifier in a weights file."""
    tensors = unwrap(read_checkpoint(path)[0])
    names = classifier_names(network)
    head = [name for name, _ in network.named_parameters() if name in names]
    missing = [name for name in head if name not in tensors]
    if missing or not head:
        start_from(network, path)  # raises if the other weights do not fit either: the file is of another network
        raise TrainingError(f"{path} holds no classifier for this network: {', '.join(missing) or 'it has none'}")
    return len(tensors[head[0]])


def _class_names(network: nn.Module) -> ClassNames | None:
    """Returns the names of the classes that the configuration of the network lists, or those of ImageNet."""
    listed = getattr(network, "pretrained_cfg", {}).get("label_names") or []
    names = [str(name) for name in (listed.values() if isinstance(listed, dict) else listed)]
    imagenet = ClassNames.imagenet(network)  # also knows the WordNet ids, which the configuration does not list
    if imagenet is not None and names == imagenet.names:
        return imagenet
    return ClassNames.of(names) if len(names) == _num_classes(network) > 0 else imagenet


def _num_classes(network: nn.Module) -> int:
    return int(getattr(network, "num_classes", 0)) if classifier_parameters(network) else 0


def _warn_if_untrained(network: nn.Module, recipe: Recipe, size: int) -> None:
    """Warns if a mechanism that the weights do not contain changes the output of the network."""
    if changes_outputs(network, origin_of(network), size):
        logger.warning(
            "the weights do not contain what is attached to %s, which is untrained and changes its output", recipe.model
        )
