"""Descriptions of mechanisms that are saved with their tensors."""

from __future__ import annotations

from typing import Any

from torch import nn

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
