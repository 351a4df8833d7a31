"""What every mechanism records of itself beside its tensors."""

from __future__ import annotations

from typing import Any

from torch import nn

METADATA = "layer_attention"  # entry of a state dict's metadata


def record_description(module: nn.Module) -> None:
    """Save `module.describe()` with its state dict, and refuse to load what was saved with another."""
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
    """One sentence for each entry in which a saved module and this one differ, though their tensors may be alike."""
    return [
        f"{name} was saved with {entry}={saved[entry]}, this model has {entry}={ours[entry]}: "
        f"build the model with the saved {entry} to load these weights"
        for entry in ours
        if entry in saved and saved[entry] != ours[entry]
    ]
