"""Checkpoints: everything that is needed to resume a run as if it had never stopped.

A checkpoint is a folder. It holds ``weights.safetensors``, optionally ``ema.safetensors`` and ``best.safetensors``, and
``state.pt`` (optimizer, scaler, random state, position in the data, sums of the epoch so far). All files can be read
without executing code from them. The folder is written under a temporary name, flushed to disk and renamed, so that a
folder ``step_N`` is always complete. The previous checkpoint is kept until the new one exists.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..mechanisms import fit_flags, fit_gate_factors, fit_uniform_heads
from ..models.checkpoints import CheckpointError, read_checkpoint, save_weights
from ..models.weights import check_fit
from .files import TrainingError, flush_folder, make_folder, writing
from .isolation import random_state, restore_random_state
from .setup import TrainingSetup
from .sharding import full_state, load_full_state
from .step import EpochSums
from .stop import record_checkpoint

KEPT = 2  # the newest, and its predecessor in case the newest cannot be read


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, network: nn.Module, weights: Mapping[str, Mapping[str, Tensor]], state: Any) -> Path:
        """Writes the checkpoint of ``step``, then removes all but the newest two.

        Args:
            weights: state dicts by file name.
            state: an object that ``torch.load(weights_only=True)`` can read.
        """
        make_folder(self.folder)
        path = self.folder / f"step_{step:09d}"
        temporary = self.folder / f".{path.name}.new"
        with writing(path):
            for unfinished in self.folder.glob(".step_*.new"):  # left by a process that was killed
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
                if path.exists():  # a resumed run saves the same step again
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
        """Returns the folders of complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(self.folder.glob("step_*")) or sorted(self.folder.glob(".step_*.old"))

    def load(self, network: nn.Module | None = None) -> tuple[Path, dict[str, Mapping[str, Tensor]], Any] | None:
        """Reads the newest readable checkpoint: its folder, weights by name, state. Returns None if there is none.

        Args:
            network: the network that uniform heads of earlier versions are fitted to; if None, tensors are as written.
        """
        failures = []
        for path in reversed(self.all()):
            try:
                weights: dict[str, Mapping[str, Tensor]] = {
                    file.stem: _fitted(network, *read_checkpoint(file)) for file in path.glob("*.safetensors")
                }
                if "weights" not in weights:
                    raise CheckpointError(f"{path} holds no weights")
                return path, weights, torch.load(path / "state.pt", map_location="cpu", weights_only=True)
            except Exception as error:  # damaged on disk: its predecessor may be intact
                failures.append(f"{path}: {' '.join(str(error).split())[:200]}")
        if failures:
            raise TrainingError(f"no checkpoint can be read; {failures[0]}")
        return None


def _fitted(
    network: nn.Module | None, tensors: dict[str, Tensor], descriptions: dict[str, dict[str, str]]
) -> dict[str, Tensor]:
    return tensors if network is None else fit_uniform_heads(network, tensors, descriptions)


def _flush_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@dataclass
class RunState:
    """The state of a run.

    Args:
        epoch, step: the position at which training continues.
        rows: the rows of the log, one per epoch.
        best: the epoch with the best headline metric on the validation split, and that value; None without a validation
            split.
        best_weights: the weights after that epoch.
        seconds: time spent in training and evaluation of complete epochs.
        epoch_seconds: time spent in training in the epoch that is not complete.
    """

    epoch: int = 0
    step: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, float] | None = None
    best_weights: dict[str, Tensor] | None = None
    seconds: float = 0.0
    epoch_seconds: float = 0.0

    def keep_best(self, setup: TrainingSetup, row: dict[str, Any]) -> None:
        """Keeps the current weights if this row is the best so far. Does nothing without a validation split.

        Every rank must call this.
        """
        headline = setup.task.headline
        key = f"eval_{headline.name}"
        if setup.data.validation is None:
            return
        if self.best is None or math.isnan(self.best[key]) or headline.is_better(row[key], self.best[key]):
            self.best = {"epoch": row["epoch"], key: row[key]}
            weights = setup.evaluated_weights()
            self.best_weights = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}


def save_run(checkpoints: Checkpoints, setup: TrainingSetup, sums: EpochSums, state: RunState) -> None:
    """Writes a checkpoint of a run. Every rank must call this; rank 0 writes."""
    processes = setup.processes
    # A stream cannot be entered at a given step: a resumed run restarts its epoch.
    step = state.step if setup.batches.exact_resume else 0
    setup.broadcast_buffers(setup.network)
    if setup.recipe.sharding == "fsdp":
        tensors, optimizer = full_state(setup.network, setup.optimizer)
    else:
        _check_finite_weights(setup, state.epoch)
        tensors, optimizer = setup.network.state_dict(), setup.optimizer.state_dict()
    rank_state = {"random": random_state(setup.device), "sums": sums.values.cpu(), "step": int(sums.step)}
    rank_states = processes.gather_objects(rank_state)
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
            "processes": rank_states,
            "rows": state.rows,
            "best": state.best,
            "seconds": state.seconds,
            "epoch_seconds": state.epoch_seconds if step else 0.0,
            "bad_images": setup.data.problems.found,
        }
        began = time.monotonic()
        checkpoints.save(state.epoch * setup.batches.steps + step, setup.network, weights, saved)
        record_checkpoint(time.monotonic() - began)
    processes.wait()


def _check_finite_weights(setup: TrainingSetup, epoch: int) -> None:
    """Raises if the weights are not finite, which can happen in an update after a finite loss."""
    norms = torch.stack(torch._foreach_norm([p.detach() for p in setup.network.parameters()]))
    if not torch.isfinite(norms).all():
        raise TrainingError(
            f"the weights are not finite in epoch {epoch + 1}, learning rate {setup.lr:.3g}; the last checkpoint is "
            f"from before it. Lower lr or set clip_grad"
        )


def _check_steps(path: Path, position: Sequence[int], setup: TrainingSetup) -> None:
    """Raises if an epoch had another number of steps when a checkpoint was written, because the data has changed."""
    epoch, step = position
    if f"step_{epoch * setup.batches.steps + step:09d}" not in path.name:
        raise TrainingError(
            f"{path} was written when the data had another number of training images than the "
            f"{len(setup.data.train):,} that {setup.recipe.data} has now: restore the data, or start a new run"
        )


def restore_run(checkpoints: Checkpoints, setup: TrainingSetup, sums: EpochSums) -> RunState:
    """Loads the newest checkpoint into ``setup`` and ``sums``. Every rank must call this.

    Returns:
        The state of the run; a new state if there is no checkpoint.
    """
    processes = setup.processes
    found = checkpoints.load(setup.network) if processes.is_main else None
    found = processes.broadcast(found)  # other ranks may be on machines that cannot access the folder
    if found is None:
        return RunState()
    path, weights, saved = found
    if len(saved["processes"]) != processes.world_size:
        raise TrainingError(
            f"{path} was written by {len(saved['processes'])} processes, but this run has {processes.world_size}: "
            f"start the same number of processes"
        )
    _check_steps(path, saved["position"], setup)
    for network in filter(None, (setup.network, setup.ema and setup.ema.module)):
        fit_gate_factors(network, weights["weights"])  # runs of earlier versions have none
        fit_flags(network, weights["weights"])
    if setup.recipe.sharding == "fsdp":
        load_full_state(setup.network, setup.optimizer, weights["weights"], saved["optimizer"])
    else:
        check_fit(setup.network, weights["weights"], f"{path} does not fit the network of the recipe")
        setup.network.load_state_dict(weights["weights"])
        setup.optimizer.load_state_dict(saved["optimizer"])
    if setup.ema is not None:
        setup.ema.module.load_state_dict(weights["ema"])
    if saved["scaler"] is not None:
        setup.scaler.load_state_dict(saved["scaler"])
    rank_state = saved["processes"][processes.rank]
    epoch, step = saved["position"]
    if step:
        sums.restart(rank_state["step"])
        sums.values.copy_(rank_state["sums"])
    setup.data.problems.found.update(saved["bad_images"])
    restore_random_state(rank_state["random"], setup.device)
    best_weights = dict(weights["best"]) if "best" in weights else None
    seconds = saved["seconds"], saved.get("epoch_seconds", 0.0)  # earlier versions do not know the latter
    return RunState(epoch, step, saved["rows"], saved["best"], best_weights, *seconds)
