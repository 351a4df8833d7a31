"""Weights in files: saving and loading with their reading, and the conversion of published checkpoints."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from timm.models import pvt_v2
from torch import Tensor, nn

from ..hosts import attached_mechanisms
from ..mechanisms import description_differences
from ..mechanisms.description import METADATA
from .published_rla import PUBLISHED_RLA, from_published_rla, has_published_rla

METADATA_KEY = "interlayer"  # entry of a safetensors file's metadata: {module name: what its tensors do not tell}
WRAPPERS = ("state_dict", "model", "model_state", "net")

# Names in the authors' programs -> names here. In order; each is tried on every name.
PUBLISHED_NAMES = (
    (r"\.mrla\.lambda_t$", ".mrla.decay"),
    (r"\.mrla\.mrla\.Wq\.", ".mrla.query."),
    (r"\.mrla\.mrla\.Wk\.", ".mrla.key."),
    (r"\.mrla\.mrla\.Wv\.", ".mrla.value."),
    (r"\.bn_mrla\.", ".mrla.norm."),
    (r"\.mrla\.normx\.", ".mrla.norm_in."),
    (r"\.mrla\.normo\.", ".mrla.norm_previous."),
)
PUBLISHED_REST = (
    (r"^stem\.pos\.pa_conv\.", "stages.0.embed.position.conv."),
    (r"^stem\.(conv|norm)(\d)\.", lambda found: f"stem.{3 * int(found[2]) - (3 if found[1] == 'conv' else 2)}."),
    (r"^patch_embed_(\d)\.pos\.pa_conv\.", lambda found: f"stages.{int(found[1]) - 1}.embed.position.conv."),
    (r"^patch_embed_(\d)\.", lambda found: f"stages.{int(found[1]) - 1}.embed."),
    (r"^stage(\d)\.", lambda found: f"stages.{int(found[1]) - 1}."),
    (r"\.attn\.sr\.", ".attn.shrink."),
    (r"\.attn\.sr_norm\.", ".attn.norm."),
    (r"\.attn\.transform_conv\.", ".attn.mix."),
)


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or does not fit; the message says what and why."""


def convert_checkpoint(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Turn the state dict of a published model into the state dict of `model`.

    Wrappers such as {"state_dict": ...} and prefixes such as "module." are removed. The model itself is not changed.

    Args:
        state_dict: what `torch.load` gave for the authors' checkpoint.
        model: the model here, built with `reading="published"`.

    Raises:
        CheckpointError: names that are missing, not known or of another shape, listed; or another reading.

    >>> model = timm.create_model("resnet50_mrla_light", reading="published")
    >>> model.load_state_dict(interlayer.convert_checkpoint(checkpoint, model))
    """
    source = unwrap(state_dict)
    check_description(_recorded(state_dict), model)
    readings = {getattr(mechanism, "reading", None) for mechanism in attached_mechanisms(model).values()}
    patterns = [pattern for pattern, _ in PUBLISHED_NAMES] + [PUBLISHED_RLA]
    if "paper" in readings and any(re.search(pattern, name) for name in source for pattern in patterns):
        raise CheckpointError(
            "a published checkpoint computes the published reading, this model the paper's: build it with "
            "reading='published'"
        )
    target = model.state_dict()
    converted: dict[str, Tensor] = {}
    published = from_published_rla(source, model) if has_published_rla(source) else _renamed(source, target)
    for name, tensor in published.items():
        expected = target.get(name)
        if expected is not None and tensor.squeeze().shape == expected.squeeze().shape:
            tensor = tensor.reshape(expected.shape)  # lambda is [C, 1, 1] there, [C] here
        converted[name] = tensor
    for name, tensor in target.items():
        if name.endswith("num_batches_tracked"):  # absent from checkpoints of old PyTorch
            converted.setdefault(name, torch.zeros_like(tensor))
    _check_names(converted, target)
    return {name: converted[name] for name in target}


def unwrap(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a checkpoint, whatever it is wrapped in."""
    state_dict = _innermost(state_dict)
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError("the checkpoint holds no tensors under any of " + ", ".join(WRAPPERS))
    prefix = _wrapping_prefix(tensors)
    return {name.removeprefix(prefix): value for name, value in tensors.items()}


def _wrapping_prefix(names: Iterable[str]) -> str:
    """What DDP, torch.compile and the like put before every name."""
    prefix = ""
    while wrapper := next((w for w in ("module.", "_orig_mod.") if all(n.startswith(prefix + w) for n in names)), ""):
        prefix += wrapper
    return prefix


def _innermost(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    while wrapper := next((w for w in WRAPPERS if isinstance(checkpoint.get(w), Mapping)), None):
        checkpoint = checkpoint[wrapper]
    return checkpoint


def _recorded(checkpoint: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Descriptions that torch.save keeps beside the tensors of a state dict, by the names without wrappers."""
    state_dict = _innermost(checkpoint)
    prefix = _wrapping_prefix([name for name, value in state_dict.items() if isinstance(value, Tensor)])
    metadata = getattr(state_dict, "_metadata", {})
    return {name.removeprefix(prefix): entry[METADATA] for name, entry in metadata.items() if METADATA in entry}


def check_description(recorded: Mapping[str, dict[str, str]], model: nn.Module) -> None:
    """Raise if what a file records of its mechanisms differs from those of `model`."""
    ours = describe(model)
    for name, saved in recorded.items():
        for difference in description_differences(name, saved, ours.get(name, {})):
            raise CheckpointError(difference)
    there, here = (
        {name for name, entry in entries.items() if entry.get("mechanism") == "ContextBroadcast"}
        for entries in (recorded, ours)
    )
    if there and there != here:  # it may have no tensors whose names would tell
        name = min(there ^ here)
        was, does = ("with", "does not") if name in there else ("without", "does")
        raise CheckpointError(
            f"the weights were saved {was} context broadcasting at {name}, where this model {does} broadcast: attach "
            f"it with the same where and blocks to load them"
        )


def _renamed(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    names: Any = PUBLISHED_REST if "patch_embed_2.pos.pa_conv.weight" in source else PUBLISHED_NAMES
    for name, tensor in source.items():
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)
        if "layer1.0.conv1.weight" in target:  # a ResNet: published MRLA-base counts stages from 0
            name = re.sub(r"^stages\.(\d)\.", lambda found: f"layer{int(found[1]) + 1}.", name)
        renamed[name] = tensor
    if "patch_embed1.proj.weight" in renamed:  # the names of PVTv2's own authors
        renamed = pvt_v2.checkpoint_filter_fn(renamed, None)
    return renamed


def _check_names(found: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    problems = {
        "missing": [name for name in target if name not in found],
        "unknown": [name for name in found if name not in target],
        "of another shape": [
            f"{name} {tuple(found[name].shape)}, expected {tuple(target[name].shape)}"
            for name in target
            if name in found and found[name].shape != target[name].shape
        ],
    }
    listed = [f"{what}: {', '.join(names)}" for what, names in problems.items() if names]
    if listed:
        raise CheckpointError("the checkpoint does not fit the model; " + "; ".join(listed))


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """State dict and descriptions in a .safetensors file or a PyTorch file, without running code from it."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                names = file.keys()
                return {name: file.get_tensor(name) for name in names}, json.loads(metadata.get(METADATA_KEY, "{}"))
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint of tensors: {reason[:200]}; expected a .safetensors file, or a "
            f"PyTorch file that loads with weights_only=True"
        ) from error
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f"{path} holds a {type(checkpoint).__name__}, expected a state dict")
    return dict(checkpoint), _recorded(checkpoint)


def describe(model: nn.Module) -> dict[str, dict[str, str]]:
    """What the tensors of each mechanism do not tell: mechanism, reading, channels per head."""
    return {name: module.describe() for name, module in model.named_modules() if hasattr(module, "describe")}  # type: ignore[operator]


def save_weights(
    model: nn.Module, path: str | os.PathLike[str], state_dict: Mapping[str, Tensor] | None = None
) -> None:
    """Write the weights of `model` (or `state_dict` in their place) and its description to a .safetensors file.

    The file appears under its name only when it is whole.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"weights are saved as .safetensors, got {path.name!r}")
    if not path.parent.is_dir():
        raise CheckpointError(f"{path.parent}: no such folder")
    tensors = {k: v.detach().cpu().contiguous() for k, v in (state_dict or model.state_dict()).items()}
    write_tensors(tensors, path, {"format": "pt", METADATA_KEY: json.dumps(describe(model))})


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a .safetensors file that appears under its name only when it is whole."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            safetensors.torch.save_file(_own_memory(tensors), temporary, metadata)
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load weights saved by `save_weights`, or any state dict of this model, strictly.

    Refused, with nothing loaded, where the file was saved with another reading, mechanism or number of channels per
    head: such files can hold equal tensors that mean different functions.
    """
    state_dict, descriptions = read_checkpoint(path)
    check_description(descriptions, model)
    tensors = unwrap(state_dict)
    _check_names(tensors, model.state_dict())
    model.load_state_dict(tensors)


def _own_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share storage, such as tied weights, are copied: safetensors stores each on its own."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in seen:
            tensors[name] = tensor.clone()
        seen.add(pointer)
    return tensors


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
