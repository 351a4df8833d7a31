"""Reading and writing of checkpoint files, including the descriptions of mechanisms.

A description holds the options of a mechanism that cannot be inferred from its tensors, such as its reading and its
channels per head. It is stored in the metadata of a .safetensors file, and by ``torch.save`` in the metadata of a state
dict.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from .. import mechanisms
from ..mechanisms import description_differences
from ..mechanisms.description import METADATA

METADATA_KEY = "interlayer"  # entry of a safetensors file's metadata: {module name: description}
WRAPPERS = ("state_dict", "model", "model_state", "net")

Descriptions = dict[str, dict[str, str]]


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not fit the model; the message states the reason."""


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Descriptions]:
    """Reads the state dict and the descriptions of a .safetensors file or a PyTorch file, without executing code."""
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder, expected a .safetensors file or a PyTorch file")
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
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint of tensors: {_unreadable_reason(path, error)}; expected a "
            ".safetensors file, or a PyTorch file that loads with weights_only=True"
        ) from error
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f"{path} holds a {type(checkpoint).__name__}, expected a state dict")
    return dict(checkpoint), recorded_descriptions(checkpoint)


def _unreadable_reason(path: Path, error: Exception) -> str:
    """Returns why a file cannot be read. torch's own message advises to load it in a way that executes its code."""
    if isinstance(error, (OSError, RuntimeError, safetensors.SafetensorError)):
        return str(error).strip().splitlines()[0][:200]
    try:
        objects = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # files in the format before torch 1.6, and files that are not of torch
        objects = []
    if objects:
        return f"it contains {', '.join(sorted(objects)[:3])}, and loading other objects than tensors can execute code"
    return "it contains other objects than tensors, or is not a PyTorch file"


def save_weights(
    model: nn.Module, path: str | os.PathLike[str], state_dict: Mapping[str, Tensor] | None = None
) -> None:
    """Writes the weights of `model` (or `state_dict` instead) and its description to a .safetensors file.

    The file is written atomically.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"weights are saved as .safetensors, got {path.name!r}")
    if not path.parent.is_dir():
        raise CheckpointError(f"{path.parent}: no such folder")
    tensors = {k: v.detach().cpu().contiguous() for k, v in (state_dict or model.state_dict()).items()}
    write_tensors(tensors, path, {"format": "pt", METADATA_KEY: json.dumps(describe(model))})


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes a .safetensors file atomically."""
    try:
        with replacing(path) as temporary:
            safetensors.torch.save_file(_own_memory(tensors), temporary, metadata)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary file next to `path`, with the same suffix, which replaces `path` at the end of the block.

    If the block raises an error, the temporary file is removed and `path` stays as it was.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # mkstemp lets nobody else read the file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def named_tensors(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint by name, without wrappers such as ``{"state_dict": ...}``."""
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f"expected a state dict, a mapping of names to tensors, got {type(checkpoint).__name__}")
    tensors = {name: value for name, value in _innermost(checkpoint).items() if isinstance(value, Tensor)}
    for name in tensors:
        if not isinstance(name, str):
            raise CheckpointError(
                f"expected a state dict whose keys are names of type str, got the key {name!r} of type "
                f"{type(name).__name__}"
            )
    return tensors


def unwrap(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint by name, without wrappers and without common prefixes such as "module."."""
    tensors = named_tensors(checkpoint)
    if not tensors:
        raise CheckpointError("the checkpoint holds no tensors under any of " + ", ".join(WRAPPERS))
    prefix = _wrapping_prefix(tensors)
    return {name.removeprefix(prefix): value for name, value in tensors.items()}


def describe(model: nn.Module) -> Descriptions:
    """Returns the description of each mechanism, such as its class, reading and channels per head."""
    return {name: module.describe() for name, module in model.named_modules() if hasattr(module, "describe")}  # type: ignore[operator]


def recorded_descriptions(checkpoint: Mapping[str, Any]) -> Descriptions:
    """Returns the descriptions in the metadata of a state dict, by names without wrappers."""
    state_dict = _innermost(checkpoint)
    prefix = _wrapping_prefix([n for n, v in state_dict.items() if isinstance(v, Tensor) and isinstance(n, str)])
    metadata = getattr(state_dict, "_metadata", {})
    return {name.removeprefix(prefix): entry[METADATA] for name, entry in metadata.items() if METADATA in entry}


def check_description(recorded: Mapping[str, dict[str, str]], model: nn.Module) -> None:
    """Raises a CheckpointError if the recorded mechanisms of a file differ from those of `model`.

    A mechanism without tensors is not detected by missing or unexpected names. Its class lists the options that
    determine where it is attached in `placement_options`, and its locations in the file and the model must be equal.
    """
    ours = describe(model)
    for name, saved in recorded.items():
        for difference in description_differences(name, saved, ours.get(name, {})):
            raise CheckpointError(difference)
    classes = {type(module).__name__: type(module) for module in model.modules()} | vars(mechanisms)
    for mechanism in sorted({entry.get("mechanism", "") for entry in recorded.values()}):
        kind = classes.get(mechanism)
        options = getattr(kind, "placement_options", ())
        saved_names, own_names = (
            {name for name, entry in entries.items() if entry.get("mechanism") == mechanism}
            for entries in (recorded, ours)
        )
        if options and saved_names != own_names:
            name = min(saved_names ^ own_names)
            was, has = ("with", "has none") if name in saved_names else ("without", "has it")
            raise CheckpointError(
                f"the weights were saved {was} {kind.title} at {name}, where this model {has}: attach it with the same "  # type: ignore[union-attr]
                f"{' and '.join(options)} to load them"
            )


def _wrapping_prefix(names: Collection[str]) -> str:
    """Returns the prefix that wrappers such as DDP and torch.compile add to every name."""
    prefix = ""
    while wrappers := [w for w in ("module.", "_orig_mod.") if names and all(n.startswith(prefix + w) for n in names)]:
        prefix += wrappers[0]
    return prefix


def _innermost(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    while wrapper := next((w for w in WRAPPERS if isinstance(checkpoint.get(w), Mapping)), None):
        checkpoint = checkpoint[wrapper]
    return checkpoint


def _own_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors that share storage, such as tied weights, because safetensors does not support shared storage."""
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
