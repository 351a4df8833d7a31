"""Checkpoints: everything a run needs to go on as if it had never stopped.

A checkpoint is a folder: ``weights.safetensors``, ``ema.safetensors`` and ``best.safetensors`` where there are such
weights, and ``state.pt`` (optimizer, scaler, random numbers, place in the data, sums of the epoch so far), all readable
without running code from them. It is written under a temporary name, flushed to the disk and renamed, so a folder
``step_N`` is always whole. The one before stays until the new one is there.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..models.checkpoints import CheckpointError, read_checkpoint, save_weights
from .files import TrainingError, flush_folder, make_folder, writing
from .setup import TrainingSetup
from .sharding import full_state, load_full_state
from .step import EpochSums

KEPT = 2  # the newest, and the one before it in case the newest cannot be read


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, network: nn.Module, weights: Mapping[str, Mapping[str, Tensor]], state: Any) -> Path:
        """Writes a checkpoint of ``step``, then removes those older than the one before it.

        Args:
            weights: state dicts, by the name of their file.
            state: what ``torch.load(weights_only=True)`` can read.
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
        """Returns the folders of whole checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(self.folder.glob("step_*")) or sorted(self.folder.glob(".step_*.old"))

    def load(self) -> tuple[Path, dict[str, Mapping[str, Tensor]], Any] | None:
        """Reads the newest checkpoint that can be read: its folder, weights by name, state; None if there is none."""
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


@dataclass
class RunState:
    """What a run has come to so far.

    Args:
        epoch, step: where to go on.
        rows: the rows of the log, one an epoch.
        best: the epoch whose held-out headline was best, and that value; None without a validation split.
        best_weights: the weights after that epoch.
        seconds: time spent in training and evaluation.
    """

    epoch: int = 0
    step: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, float] | None = None
    best_weights: dict[str, Tensor] | None = None
    seconds: float = 0.0

    def keep_best(self, setup: TrainingSetup, row: dict[str, Any]) -> None:
        """Keeps the weights of the epoch of this row if it is the best so far and a validation split chooses.

        Every rank must call this.
        """
        headline = setup.task.headline
        key = f"eval_{headline.name}"
        if setup.data.validation is None:
            return
        if self.best is None or headline.is_better(row[key], self.best[key]):
            self.best = {"epoch": row["epoch"], key: row[key]}
            weights = setup.evaluated_weights()
            self.best_weights = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}


def save_run(checkpoints: Checkpoints, setup: TrainingSetup, sums: EpochSums, state: RunState) -> None:
    """Writes a checkpoint of a run; every rank must call this, and rank 0 writes."""
    processes = setup.processes
    # a stream has no place to go back to: it begins its epoch again
    step = state.step if setup.batches.exact_resume else 0
    setup.broadcast_buffers(setup.network)
    if setup.recipe.sharding == "fsdp":
        tensors, optimizer = full_state(setup.network, setup.optimizer)
    else:
        _check_finite_weights(setup, state.epoch)
        tensors, optimizer = setup.network.state_dict(), setup.optimizer.state_dict()
    own = {"random": random_state(setup.device), "sums": sums.values.cpu(), "step": int(sums.step)}
    of_ranks = processes.gather_objects(own)
    if processes.is_main:
        weights: dict[str, Mapping[str, Tensor]] = {"weights": tensors}
        if setup.ema is not None:
            weights["ema"] = setup.ema.module.state_dict()
        if state.best_weights is not None:
            weights["best"] = state.best_weights
        saved = {
            "position": [state.epoch, step],
            "optimizer": optimizer,
            "scaler": setup.scaler.state_dict() if setup.scaler.is_enabled() else None,
            "processes": of_ranks,
            "rows": state.rows,
            "best": state.best,
            "seconds": state.seconds,
            "bad_images": setup.data.problems.found,
        }
        checkpoints.save(state.epoch * setup.batches.steps + step, setup.network, weights, saved)
    processes.wait()


def _check_finite_weights(setup: TrainingSetup, epoch: int) -> None:
    """Keeps an update that ruined the weights, after a loss that was still finite, out of the checkpoints."""
    norms = torch.stack(torch._foreach_norm([p.detach() for p in setup.network.parameters()]))
    if not torch.isfinite(norms).all():
        raise TrainingError(
            f"the weights are not finite in epoch {epoch + 1}, learning rate {setup.lr:.3g}; the last checkpoint is "
            f"from before it. Lower lr or set clip_grad"
        )


def restore_run(checkpoints: Checkpoints, setup: TrainingSetup, sums: EpochSums) -> RunState:
    """Loads the newest checkpoint into the set-up and the sums; every rank must call this.

    Returns:
        What the run had come to; a new state if there is no checkpoint.
    """
    processes = setup.processes
    found = checkpoints.load() if processes.is_main else None
    found = processes.broadcast(found)  # other ranks may be on machines that do not see the folder
    if found is None:
        return RunState()
    path, weights, saved = found
    if len(saved["processes"]) != processes.world_size:
        raise TrainingError(
            f"{path} was written by {len(saved['processes'])} processes, these are {processes.world_size}: use as many"
        )
    if setup.recipe.sharding == "fsdp":
        load_full_state(setup.network, setup.optimizer, weights["weights"], saved["optimizer"])
    else:
        setup.network.load_state_dict(weights["weights"])
        setup.optimizer.load_state_dict(saved["optimizer"])
    if setup.ema is not None:
        setup.ema.module.load_state_dict(weights["ema"])
    if saved["scaler"] is not None:
        setup.scaler.load_state_dict(saved["scaler"])
    own = saved["processes"][processes.rank]
    epoch, step = saved["position"]
    if step:
        sums.restart(own["step"])
        sums.values.copy_(own["sums"])
    setup.data.problems.found.update(saved["bad_images"])
    restore_random_state(own["random"], setup.device)
    best_weights = dict(weights["best"]) if "best" in weights else None
    return RunState(epoch, step, saved["rows"], saved["best"], best_weights, saved["seconds"])


def random_state(device: torch.device) -> dict[str, Any]:
    """Returns the state of every generator of random numbers that a model may draw from."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": list(random.getstate()[1]),
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Sets the generators to what `random_state` returned."""
    random.setstate((3, tuple(state["python"]), None))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
