"""Descriptions of mechanisms that are saved with their tensors, and flags among the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

METADATA = "layer_attention"  # key in the metadata of a state dict


def record_description(module: nn.Module) -> None:
    """Save `module.describe()` with the state dict, and report an error on loading if a saved description differs."""
    module.register_state_dict_post_hook(_record_description)
    module.register_load_state_dict_pre_hook(_refuse_other_description)


def _record_description(module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    local_metadata[METADATA] = module.describe()  # type: ignore[operator]


def _refuse_other_description(
    module: nn.Module,
    state_dict: Any,
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    saved = local_metadata.get(METADATA)
    if saved is not None:
        error_msgs.extend(description_differences(prefix.rstrip("."), saved, module.describe()))  # type: ignore[operator]


def description_differences(name: str, saved: dict[str, str], ours: dict[str, str]) -> list[str]:
    """Returns one sentence for each entry in which the description of a saved module differs from that of this one."""
    return [
        f"{name} was saved with {entry}={saved[entry]}, this model has {entry}={ours[entry]}: "
        f"build the model with the saved {entry} to load these weights"
        for entry in ours
        if entry in saved and saved[entry] != ours[entry]
    ]


def record_flag(module: nn.Module, name: str, value: bool, *, known_by: str) -> None:
    """Record a property of `module` by a tensor of its state dict, which exists if the property is true.

    Earlier versions did not have the property. Their weights do not contain the tensor, and make the property false
    when they are loaded, so that they compute the function that they were trained for.

    Args:
        module: the module. Its attribute `name` becomes a tensor, or None.
        name: name of the property.
        value: whether the property is true.
        known_by: name of a tensor of `module` that all its weights contain.
    """
    module.recorded_flags = {**_flags(module), name: known_by}  # type: ignore[assignment]
    _set_flag(module, name, value)
    module.register_load_state_dict_pre_hook(_fit_flags)


def fit_flags(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the modules of `model` the properties that they had when `tensors` was saved. See `record_flag`."""
    for name, module in model.named_modules():
        _fit_flags(module, tensors, f"{name}." if name else "")


@contextmanager
def fitted_flags(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Run `fit_flags`, and undo it if the body raises an error, such as that of tensors that do not fit."""
    before = [
        (module, name, getattr(module, name) is not None) for module in model.modules() for name in _flags(module)
    ]
    try:
        fit_flags(model, tensors)
        yield
    except Exception:
        for module, name, value in before:
            _set_flag(module, name, value)
        raise


def _flags(module: nn.Module) -> Mapping[str, str]:
    """Returns the `known_by` of every property that `record_flag` recorded."""
    return getattr(module, "recorded_flags", {})  # type: ignore[return-value]


def _set_flag(module: nn.Module, name: str, value: bool) -> None:
    device = next((parameter.device for parameter in module.parameters()), None)
    module.register_buffer(name, torch.ones((), dtype=torch.long, device=device) if value else None)


def _fit_flags(module: nn.Module, tensors: Mapping[str, Tensor], prefix: str, *others: Any) -> None:
    for name, known_by in _flags(module).items():
        if f"{prefix}{known_by}" in tensors:
            _set_flag(module, name, f"{prefix}{name}" in tensors)
