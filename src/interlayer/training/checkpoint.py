"""Checkpoints: everything a run needs to go on as if it had never stopped.

A checkpoint is a folder: `weights.safetensors`, `ema.safetensors` where there is one, and `state.pt` (optimiser,
scaler, random numbers, place in the data, sums of the epoch so far), all readable without running code from them. It is
written under a temporary name, brought to the disk and renamed, so a folder `step_N` is always whole. The one before
stays until the new one is there.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..models.checkpoints import CheckpointError, read_checkpoint, save_weights
from .files import TrainingError, flush_folder, make_folder, writing

KEPT = 2  # the newest, and the one before it in case the newest cannot be read


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, network: nn.Module, weights: Mapping[str, Mapping[str, Tensor]], state: Any) -> Path:
        """Write a checkpoint of `step`, then remove those older than the one before it.

        Args:
            weights: name of the file -> state dict.
            state: what `torch.load(weights_only=True)` can read.
        """
        make_folder(self.folder)
        path = self.folder / f"step_{step:09d}"
        temporary = self.folder / f".{path.name}.new"
        with writing(path):
            for unfinished in self.folder.glob(".step_*.new"):  # of a process that was killed
                shutil.rmtree(unfinished, ignore_errors=True)
            aside = self.folder / f".{path.name}.old"
            try:
                temporary.mkdir()
                for name, tensors in weights.items():
                    save_weights(network, temporary / f"{name}.safetensors", tensors)
                torch.save(state, temporary / "state.pt")
                for file in temporary.iterdir():
                    _flush_file(file)
                flush_folder(temporary)
                if path.exists():  # the same step again, after a resume
                    os.replace(path, aside)
                os.replace(temporary, path)
                flush_folder(self.folder)
                shutil.rmtree(aside, ignore_errors=True)
            except CheckpointError as error:
                raise TrainingError(f"{error}; the checkpoint before it is intact") from error
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        for old in self.all()[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return path

    def all(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(self.folder.glob("step_*")) or sorted(self.folder.glob(".step_*.old"))

    def load(self) -> tuple[Path, dict[str, Mapping[str, Tensor]], Any] | None:
        """The newest checkpoint that can be read: its folder, weights by name and state; None where there is none."""
        failures = []
        for path in reversed(self.all()):
            try:
                weights: dict[str, Mapping[str, Tensor]] = {
                    file.stem: read_checkpoint(file)[0] for file in path.glob("*.safetensors")
                }
                if "weights" not in weights:
                    raise CheckpointError(f"{path} holds no weights")
                return path, weights, torch.load(path / "state.pt", map_location="cpu", weights_only=True)
            except Exception as error:  # damaged on the disk: the one before it may be whole
                failures.append(f"{path}: {' '.join(str(error).split())[:200]}")
        if failures:
            raise TrainingError(f"no checkpoint can be read; {failures[0]}")
        return None


def _flush_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator of random numbers a model may draw from."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": list(random.getstate()[1]),
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    random.setstate((3, tuple(state["python"]), None))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
