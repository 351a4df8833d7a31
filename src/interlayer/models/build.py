"""Builds a network from its name: NAME, or NAME+MECHANISM:OPTION=VALUE to attach mechanisms to a backbone.

NAME is the name of a timm model, or hf-hub:USER/NAME or local-dir:FOLDER for a model that is stored with its weights.
All names of models in recipes and on the command line are resolved here; see names.py for their parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import safetensors
import timm
import torch
from torch import nn

from .. import hosts
from ..hosts.finding.probe import reason
from .errors import ModelError
from .hub import StoredModel, is_stored, read_stored
from .names import own_mechanism, own_options, parse_value, split_name
from .origin import Origin, all_tensors, origin_of, record_origin, taken_over
from .pretrained import find_pretrained, pretrained_error
from .registry import backbone_of, check_name
from .weights import classifier_names, classifier_parameters, load_weights, start_from

__all__ = ["ModelError", "build_network", "check_network", "check_size", "parse_value", "plain_name", "split_name"]


def plain_name(name: str) -> str:
    """Returns the name of the backbone that a network extends, or the name itself for a plain backbone."""
    backbone, mechanisms = split_name(name)
    if is_stored(backbone) and not mechanisms:
        return plain_name(_read(backbone).name)
    return backbone if mechanisms else backbone_of(backbone)


def check_network(name: str) -> None:
    """Raises an error if the backbone or a mechanism of a name is not known. The network is not built."""
    backbone, mechanisms = split_name(name)
    for mechanism, _ in mechanisms:
        hosts.options_of(mechanism)
    if is_stored(backbone):
        check_network(_read(backbone).name)
        return
    _check_backbone(backbone)
    if own_options(name) and not own_mechanism(name):
        raise ModelError(
            f"{backbone} has no mechanism by itself that could take options: write them behind the mechanism, as in "
            f"{backbone}+MECHANISM:OPTION=VALUE"
        )


def _check_backbone(name: str) -> None:
    try:
        check_name(name)
    except ValueError as error:
        raise ModelError(str(error)) from error


def build_network(
    name: str,
    *,
    num_classes: int | None = None,
    pretrained: bool = False,
    image_size: int | None = None,
    drop_rate: float = 0.0,
    drop_path_rate: float = 0.0,
    model_options: Mapping[str, Any] | None = None,
    attach_options: Mapping[str, Any] | None = None,
    weights: str | None = None,
    zero_head: bool = False,
    batch_norm_momentum: float | None = None,
) -> nn.Module:
    """Builds a network and attaches the mechanisms in its name.

    Args:
        name: name of a timm model, NAME+MECHANISM, or several mechanisms with options such as
            "deit_small_patch16_224+cb:scaled=true+mrla_light". NAME may be hf-hub:USER/NAME or local-dir:FOLDER. A
            named model of this library takes options of its mechanism as "resnet50_mrla_light:drop_path=0.1".
        num_classes: number of classes; the default of the model if None.
        pretrained: whether to load the pretrained weights of the backbone, or the weights of a stored model. Ignored if
            ``weights`` is given.
        image_size: size of the images, for which networks with a fixed input size are built.
        drop_rate: dropout rate before the classifier.
        drop_path_rate: stochastic depth rate of the backbone, also used by mechanisms that support it.
        model_options: additional options of ``timm.create_model``.
        attach_options: additional options of `interlayer.attach`, for a name with exactly one mechanism.
        weights: path of a file of initial weights; see `start_from`.
        zero_head: whether to initialize the classifier to zero.
        batch_norm_momentum: momentum of every batch norm, in PyTorch's convention (the weight of the new batch).

    Mechanisms with the option ``init`` default to ``init="identity"`` if the network starts from trained weights.

    Raises:
        ModelError: the name or an option is not known.
        AttachError: the mechanism cannot be attached to the network.
        CheckpointError: the weights do not fit the network.

    >>> build_network("resnet18+mrla_light:channels_per_head=16", num_classes=10)
    """
    backbone, mechanisms = split_name(name)
    if attach_options and len(mechanisms) != 1:
        needed = (
            "one mechanism: write them behind each, NAME+cb:scaled=true+mrla_light" if mechanisms else "a mechanism"
        )
        raise ModelError(f"attach_options need {needed}, got --model {name}")
    for mechanism, _ in mechanisms:
        hosts.options_of(mechanism)  # an unknown mechanism is reported before the backbone is built
    options = dict(model_options or {})
    if own_options(name):
        check_network(name)
        options["attach_options"] = {**(options.get("attach_options") or {}), **own_options(name)}
    if drop_rate:
        options["drop_rate"] = drop_rate
    if drop_path_rate:
        options["drop_path_rate"] = drop_path_rate
    pretrained = pretrained and not weights
    create = _create_stored if is_stored(backbone) else _create
    network = create(backbone, options, num_classes=num_classes, pretrained=pretrained, image_size=image_size)
    origin, tensors = _pretrained_origin(network, backbone) if pretrained else (Origin(), {})
    defaults: dict[str, Any] = {}
    if pretrained or weights:
        defaults["init"] = "identity"  # a trained network initially computes the same function
    if drop_path_rate:
        defaults["drop_path"] = "backbone"
    for mechanism, inline in mechanisms:
        network = _attach(network, mechanism, {**(attach_options or {}), **inline}, defaults, image_size)
    if pretrained:  # a mechanism keeps the tensors of the backbone, or replaces those that it changes
        kept = {name for name, tensor in all_tensors(network) if tensors.get(name) is tensor}
        origin = replace(origin, loaded=frozenset(kept | taken_over(network, tensors)))
    if weights:
        origin = start_from(network, weights).origin
    if zero_head:
        for parameter in classifier_parameters(network):
            nn.init.zeros_(parameter)
        origin = replace(origin, loaded=origin.loaded - classifier_names(network))
    record_origin(network, origin)
    if batch_norm_momentum is not None:
        for module in network.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = batch_norm_momentum
    return network


def _create(
    name: str, options: dict[str, Any], *, num_classes: int | None, pretrained: bool, image_size: int | None
) -> nn.Module:
    _check_backbone(name)
    if pretrained:
        options = {**options, **find_pretrained(name, options)}
    network: Any = _create_with_timm(
        name, options, num_classes=num_classes, pretrained=pretrained, image_size=image_size
    )
    if pretrained:
        network.pretrained_cfg.pop("state_dict", None)  # the weights of a package, which the network now holds
    return network


def _create_with_timm(
    name: str, options: dict[str, Any], *, num_classes: int | None, pretrained: bool, image_size: int | None
) -> nn.Module:
    defaults = {"pretrained": pretrained} | ({} if num_classes is None else {"num_classes": num_classes})
    try:
        if image_size and "img_size" not in options:
            try:  # networks with position embeddings for a fixed size
                return timm.create_model(name, **{**defaults, "img_size": image_size, **options})
            except TypeError:
                pass
        return timm.create_model(name, **{**defaults, **options})
    except (TypeError, RuntimeError, ValueError, safetensors.SafetensorError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ModelError(f"{name} cannot be built{f' with {given}' if given else ''}: {reason(error)}") from error
    except OSError as error:
        if not pretrained:
            raise
        raise pretrained_error(name, reason(error)) from error


def _pretrained_origin(network: Any, backbone: str) -> tuple[Origin, dict[str, Any]]:
    """Returns the origin of a backbone that was created with pretrained weights, and the loaded tensors.

    timm does not load a classifier with another number of classes.

    Args:
        backbone: the name of the backbone.
    """
    recorded = origin_of(network)
    if recorded.source:  # a stored model, which was built and loaded here
        return recorded, {name: tensor for name, tensor in all_tensors(network) if name in recorded.loaded}
    config = network.pretrained_cfg or {}
    classes = config.get("num_classes")
    other_head = classes is not None and classes != getattr(network, "num_classes", classes)
    head = classifier_names(network) if other_head else set()
    tensors = {name: tensor for name, tensor in all_tensors(network) if name not in head}
    name = ".".join(filter(None, (config.get("architecture"), config.get("tag"))))
    source = backbone if is_stored(backbone) else f"timm's pretrained weights {name}"
    return Origin(source, frozenset(tensors), (classes or None) if other_head else None), tensors


def _read(name: str, *, weights: bool = False) -> StoredModel:
    try:
        return read_stored(name, weights=weights)
    except ValueError as error:
        raise ModelError(str(error)) from error


def _create_stored(
    name: str, options: dict[str, Any], *, num_classes: int | None, pretrained: bool, image_size: int | None
) -> nn.Module:
    """Builds a stored model: by timm, or here if its architecture is NAME+MECHANISM."""
    stored = _read(name, weights=pretrained)
    backbone, mechanisms = split_name(stored.name)
    if not mechanisms:
        try:
            check_name(backbone)
        except ValueError as error:
            raise ModelError(f"{stored.folder}: {error}") from error
        folder = f"local-dir:{stored.folder}"
        return _create_with_timm(folder, options, num_classes=num_classes, pretrained=pretrained, image_size=image_size)
    own = {**stored.options, **options}
    attach_options, size = own.pop("attach_options", None), own.pop("img_size", None)
    network: Any = build_network(
        stored.name,
        num_classes=stored.num_classes if num_classes is None else num_classes,
        image_size=image_size or size,
        model_options=own,
        attach_options=attach_options,
    )
    config = {**network.pretrained_cfg, **stored.config, "num_classes": network.num_classes}
    network.pretrained_cfg = network.default_cfg = config
    if pretrained:
        same_size = num_classes in (None, stored.num_classes) and image_size in (None, size)
        try:
            file = stored.weights()
        except ValueError as error:
            raise ModelError(str(error)) from error
        if same_size:
            load_weights(network, file)
            origin = Origin(str(file), frozenset(name for name, _ in all_tensors(network)))
        else:
            origin = start_from(network, file).origin
        record_origin(network, origin)
    return network


def _attach(
    network: nn.Module, mechanism: str, options: dict[str, Any], defaults: dict[str, Any], image_size: int | None
) -> nn.Module:
    suitable = {name: value for name, value in defaults.items() if hosts.accepts_option(mechanism, name, value)}
    options = suitable | options
    if image_size:
        options.setdefault("image_size", image_size)
    try:
        return hosts.attach(network, mechanism, **options)
    except TypeError as error:
        raise ModelError(f"the options do not fit {mechanism}: {reason(error)}") from error


def check_size(network: nn.Module, name: str, size: int) -> None:
    """Raises a ModelError if the network does not accept images of ``size`` x ``size`` pixels."""
    image = torch.zeros(2, 3, size, size)
    try:
        with hosts.evaluating(network), torch.no_grad():
            network(image)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ModelError(f"{name} does not take images of {size} x {size}: {reason(error)}") from error
