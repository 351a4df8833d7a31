"""Building the network a recipe names, and what it expects of images."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import nn

from .. import hosts, models
from ..hosts.finding.probe import reason
from ..mechanisms import fit_halo_tables
from ..models.checkpoints import CheckpointError, check_description, read_checkpoint, unwrap
from .batches import Preparation
from .files import TrainingError
from .recipe import Recipe, RecipeError, parsed


def split_name(name: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """A network's name, and the mechanisms to attach with their options.

    >>> split_name("deit_small_patch16_224+cb:scaled=true,blocks=all+mrla_light")
    ('deit_small_patch16_224', [('cb', {'scaled': True, 'blocks': 'all'}), ('mrla_light', {})])
    """
    backbone, *parts = name.split("+")
    mechanisms = []
    for part in parts:
        mechanism, colon, text = part.partition(":")
        pairs = [entry.partition("=") for entry in text.split(",") if entry]
        if not mechanism or (colon and not pairs) or not all(key and equals for key, equals, _ in pairs):
            raise RecipeError(f"expected NAME+MECHANISM, or NAME+MECHANISM:KEY=VALUE,KEY=VALUE, got {name!r}")
        mechanisms.append((mechanism, {key: parsed(value) for key, _, value in pairs}))
    return backbone, mechanisms


def build_network(recipe: Recipe, classes: int) -> nn.Module:
    """The network of a recipe, for that many classes, with the weights it starts from."""
    if not recipe.model:
        raise RecipeError("the recipe names no model: give --model NAME, or NAME+MECHANISM to attach one")
    name, mechanisms = split_name(recipe.model)
    if recipe.attach_options and len(mechanisms) != 1:
        needed = (
            "one mechanism: write them behind each, NAME+cb:scaled=true+mrla_light" if mechanisms else "a mechanism"
        )
        raise RecipeError(f"attach_options need {needed}, got --model {recipe.model}")
    try:
        models.check_name(name)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    options: dict[str, Any] = {**recipe.model_options}
    if recipe.drop_rate:
        options["drop_rate"] = recipe.drop_rate
    if recipe.drop_path_rate:
        options["drop_path_rate"] = recipe.drop_path_rate
    try:
        network = _create(name, recipe, options, classes)
    except (TypeError, RuntimeError, ValueError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise TrainingError(f"{name} cannot be built{f' with {given}' if given else ''}: {reason(error)}") from error
    for mechanism, inline in mechanisms:
        network = _attach(network, mechanism, {**recipe.attach_options, **inline}, recipe)
    if recipe.weights:
        start_from(network, recipe.weights)
    if recipe.zero_head:
        for parameter in _classifier(network).parameters():
            nn.init.zeros_(parameter)
    if recipe.batch_norm_momentum is not None:
        for module in network.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = recipe.batch_norm_momentum
    return network


def _create(name: str, recipe: Recipe, options: dict[str, Any], classes: int) -> nn.Module:
    options = {"num_classes": classes, "pretrained": recipe.pretrained, **options}
    if recipe.image_size and "img_size" not in options:
        try:  # networks whose positions are made for one size
            return timm.create_model(name, img_size=recipe.image_size, **options)
        except TypeError:
            pass
    return timm.create_model(name, **options)


def _attach(network: nn.Module, mechanism: str, options: dict[str, Any], recipe: Recipe) -> nn.Module:
    takes = hosts.options_of(mechanism)
    if (recipe.pretrained or recipe.weights) and "init" in takes:
        options.setdefault("init", "identity")  # trained weights keep their function at the start
    if recipe.drop_path_rate and "drop_path" in takes:
        options.setdefault("drop_path", "backbone")
    if recipe.image_size:
        options.setdefault("image_size", recipe.image_size)
    try:
        return hosts.attach(network, mechanism, **options)
    except TypeError as error:
        raise RecipeError(f"the options do not fit {mechanism}: {reason(error)}") from error


def check_size(network: nn.Module, name: str, size: int) -> None:
    """Refuse a size of images that the network does not take, before anything is written."""
    image = torch.zeros(2, 3, size, size)
    try:
        with hosts.evaluating(network), torch.no_grad():
            network(image)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise TrainingError(f"{name} does not take images of {size} x {size}: {reason(error)}") from error


def start_from(network: nn.Module, path: str) -> None:
    """Load weights from a file; those of a classifier of another number of classes are left as they are.

    A file of a plain backbone also starts a network that something is attached to. Relative positions of local
    attention are interpolated for another block and halo (HaloNet, appendix E).
    """
    state_dict, descriptions = read_checkpoint(path)
    tensors, descriptions = fit_halo_tables(network, unwrap(state_dict), descriptions)
    check_description(descriptions, network)
    tensors = hosts.as_wide_as(network, tensors)
    own = network.state_dict()
    head = {id(p) for p in _classifier(network).parameters()}
    head_names = {name for name, p in network.named_parameters() if id(p) in head}
    replaced = hosts.names_of_replaced(network, tensors)
    fitting = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in replaced and not (name in head_names and name in own and own[name].shape != tensor.shape)
    }
    unknown = [name for name in fitting if name not in own]
    attached = {f"{name}." for name in hosts.attached_mechanisms(network)}
    missing = [
        name
        for name in own
        if name not in fitting and name not in head_names and not any(name.startswith(prefix) for prefix in attached)
    ]
    wrong = [name for name in fitting if name in own and own[name].shape != fitting[name].shape]
    for what, names in (("unknown", unknown), ("missing", missing), ("of another shape", wrong)):
        if names:
            raise CheckpointError(f"{path} does not fit the network; {what}: {', '.join(names[:5])}")
    network.load_state_dict(fitting, strict=False)
    if replaced:
        hosts.hand_to_replaced(network, tensors)


def _classifier(network: Any) -> nn.Module:
    return network.get_classifier()


def preparation_of(network: nn.Module, recipe: Recipe) -> Preparation:
    """What the network expects of images, where the recipe does not say otherwise."""
    config = timm.data.resolve_model_data_config(network)
    size = recipe.image_size or config["input_size"][-1]
    return Preparation(
        size,
        tuple(recipe.mean or config["mean"]),
        tuple(recipe.std or config["std"]),
        recipe.interpolation,
        recipe.crop_pct or config["crop_pct"],
    )


def plain_name(name: str) -> str:
    """The backbone that a network extends, by name."""
    backbone, mechanisms = split_name(name)
    return backbone if mechanisms else models.backbone_of(backbone)
