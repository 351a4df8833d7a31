"""A run from its first step to its last.

A `Trainer` is one run in one folder. `Trainer.run` is a generator that yields after every step: `train` drains one, and
a comparison takes turns between several, each on a CUDA stream of its own, so that small networks fill the GPU
together. What a step computes is in step.py, what a run is put together from in setup.py, what it needs to go on in
checkpoint.py, and whose folder it is in run_folder.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ..models.checkpoints import save_weights
from ..tasks import Scores
from .checkpoint import RunState, random_state, restore_random_state, restore_run, save_run
from .data import Data, EvalBatches
from .evaluation import evaluate_setup, save_records
from .files import TrainingError, write_json
from .logs import Logs, check_logs
from .processes import Processes, init_processes
from .progress import EpochClock, Progress
from .recipe import Recipe
from .run_folder import RunFolder
from .setup import TrainingSetup, set_up
from .step import TrainStep
from .stop import Stopped, StopRequest
from .summary import run_summary


class Trainer:
    """One run: a recipe trained in a folder.

    Args:
        recipe: what to train and how.
        folder: where the files of the run go.
        resume: whether to go on with the run that is in the folder, if there is one.
        data: the data, where several runs share it.
        processes: the ranks and their devices, where several runs share them.
        stop: called after every step; True saves a checkpoint and raises `Stopped`.
        show: told how the loading of images goes, which happens between two steps of `run`.
        command: the command that gives this run again, for the record.
        separate_random_state: whether the run puts its random numbers aside between steps, for runs that take turns.

    Attributes:
        loop: the epochs of the run; None until `run` has loaded the data.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        *,
        resume: bool = False,
        data: Data | None = None,
        processes: Processes | None = None,
        stop: Callable[[], bool] = lambda: False,
        show: Callable[[Progress], None] = lambda progress: None,
        command: str = "",
        separate_random_state: bool = False,
    ) -> None:
        self.recipe, self.resume, self.data, self.show, self.command = recipe, resume, data, show, command
        self.processes = processes or init_processes(recipe)
        self.folder = RunFolder(folder, recipe, self.processes, resume=resume)
        self.stop = StopRequest(stop, self.processes)
        self.separate_random_state = separate_random_state
        self.stream = torch.cuda.Stream() if self.processes.device.type == "cuda" else None
        self.loop: TrainingLoop | None = None

    def run(self) -> Iterator[Progress]:
        """Trains to the end, yielding after every step. The last one yielded has ``what == "done"``."""
        steps, device, random = self._run(), self.processes.device, None
        while True:
            # entered anew each time: between two steps, the caller's stream is its own
            with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
                if random is not None:
                    restore_random_state(random, device)
                try:
                    progress = next(steps)
                except StopIteration:
                    return
                except torch.OutOfMemoryError as error:
                    raise TrainingError(
                        f"the GPU's memory is too small for batch_size={self.recipe.batch_size}: set accumulate="
                        f"{self.recipe.accumulate * 2} (the same training in smaller parts) or lower batch_size; if it "
                        f"was evaluating, set eval_batch_size; if it was loading, resident=no"
                    ) from error
                if self.separate_random_state:
                    random = random_state(device)
            yield progress

    def _run(self) -> Iterator[Progress]:
        recipe, path, show = self.recipe, self.folder.path, self.show
        yield Progress(path, "loading", 0, recipe.epochs, 0, 0)
        check_logs(recipe)
        setup = set_up(
            recipe,
            self.processes,
            self.data,
            lambda what, done, total: show(Progress(path, what, 0, recipe.epochs, done, total)),
        )
        self.loop = TrainingLoop(setup, self.folder, self.stop, self.stream, resume=self.resume, command=self.command)
        yield from self.loop.run()

    @property
    def summary(self) -> dict[str, Any]:
        """What the run came to; empty until it is done."""
        return self.loop.summary if self.loop is not None else {}

    def close(self) -> None:
        """Releases the folder and the memory of the GPU."""
        if self.loop is not None:
            self.loop.close()
        self.folder.release()


class TrainingLoop:
    """The epochs of a run that is set up, from where it was left to the test at its end.

    Attributes:
        setup: the network, the batches, the optimizer and all else that a step needs.
        step: runs a step and sums the epoch up.
        state: what the run has come to.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        folder: RunFolder,
        stop: StopRequest,
        stream: torch.cuda.Stream | None,
        *,
        resume: bool,
        command: str,
    ) -> None:
        self.setup, self.folder, self.stop, self.command = setup, folder, stop, command
        self.step = TrainStep(setup, stream)
        self.state = restore_run(folder.checkpoints, setup, self.step.sums) if resume else RunState()
        self.clock = EpochClock(self.state.step, setup.batches.steps, setup.recipe.batch_size)
        self.summary: dict[str, Any] = {}
        self.logs: Logs | None = None
        if setup.processes.is_main:  # the first files of the run: a mistake before leaves nothing behind
            folder.write_recipe(setup.recipe, command)
            self.logs = Logs(folder.path, setup.recipe, setup.task, self.state.rows)

    def run(self) -> Iterator[Progress]:
        """Trains and evaluates every epoch, then tests the chosen weights."""
        for epoch in range(self.state.epoch, self.setup.recipe.epochs):
            yield from self._train(epoch)
            yield from self._evaluate_epoch(epoch)
        yield from self._test()

    def close(self) -> None:
        """Frees the captured step and closes the logs."""
        self.step.release()
        if self.logs is not None:
            self.logs.close()

    def _train(self, epoch: int) -> Iterator[Progress]:
        setup, sums, start = self.setup, self.step.sums, self.state.step
        steps, every = setup.batches.steps, setup.recipe.checkpoint_steps
        if start == 0:
            sums.restart(0)
        setup.network.train()
        self.clock = EpochClock(start, steps, setup.recipe.batch_size)
        batches = setup.batches.epoch(epoch, start)
        for step in range(start, steps):
            setup.set_lr(epoch, step)
            setup.batches.seed(epoch, step)
            self.step.run(next(batches))
            ended = step + 1 == steps
            if every and (epoch * steps + step + 1) % every == 0 and not ended:
                self._save(epoch, step + 1)
            if self.stop(step, epoch_ended=ended) and not ended:
                self._save(epoch, step + 1)
                raise Stopped(f"stopped at epoch {epoch + 1}, step {step + 1} of {steps}")
            if ended or sums.must_read(step) or sums.peek().first_bad_step >= 0:
                self.step.check_loss(epoch)
            yield self._progress("training", epoch, step + 1)

    def _evaluate_epoch(self, epoch: int) -> Iterator[Progress]:
        setup, state, steps = self.setup, self.state, self.setup.batches.steps
        if setup.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        seconds, totals, began = self.clock.seconds, self.step.sums.totals, time.perf_counter()
        scores = yield from self._evaluate(setup.held_out, "evaluating", epoch)
        row = {
            "epoch": epoch + 1,
            "step": (epoch + 1) * steps,
            "lr": setup.lr,
            "train_loss": totals.mean_loss,
            **{f"train_{name}": mean for name, mean in totals.means.items()},
            "eval_loss": scores.metrics["loss"],
            **{f"eval_{metric.name}": scores.metrics[metric.name] for metric in setup.task.eval_metrics},
            "seconds": seconds,
            "eval_seconds": time.perf_counter() - began,
            "images_per_second": self.clock.rate(steps, seconds),
        }
        state.rows.append(row)
        state.seconds += row["seconds"] + row["eval_seconds"]
        if not math.isfinite(row["eval_loss"]):
            raise TrainingError(
                f"the evaluation after epoch {epoch + 1} has a loss that is not finite; the last checkpoint is from "
                f"before it. Lower lr or set clip_grad"
            )
        state.keep_best(setup, row)
        if self.logs is not None:
            self.logs.add(row)
        self._save(epoch + 1, 0)
        yield self._progress("evaluated", epoch, steps)
        if self.stop(0, epoch_ended=True) and epoch + 1 < setup.recipe.epochs:
            raise Stopped(f"stopped at the end of epoch {epoch + 1}")

    def _test(self) -> Iterator[Progress]:
        """Tests the chosen weights once, and writes what the run came to."""
        setup, epochs, batches = self.setup, self.setup.recipe.epochs, self.setup.held_out
        if self.state.best_weights is not None:
            batches = setup.test_batches()
            setup.load_evaluated_weights(self.state.best_weights)
        scores = yield from self._evaluate(batches, "testing", epochs - 1, records=True)
        weights = setup.evaluated_weights()
        self.summary = run_summary(setup, self.state, scores, self.command)
        if setup.processes.is_main:
            save_weights(setup.network, self.folder.path / "weights.safetensors", weights)
            save_records(scores, self.folder.path)
            write_json(self.folder.path / "summary.json", self.summary)
        setup.processes.wait()
        yield self._progress("done", epochs, setup.batches.steps)

    def _evaluate(
        self, batches: EvalBatches, what: str, epoch: int, *, records: bool = False
    ) -> Generator[Progress, None, Scores]:
        """Evaluates the network or its moving average, yielding after every batch; returns the scores."""
        scores = None
        for evaluated in evaluate_setup(self.setup, batches, records=records):
            scores = evaluated
            yield self._progress(what, epoch, self.setup.batches.steps)
        assert scores is not None
        return scores

    def _save(self, epoch: int, step: int) -> None:
        """Writes a checkpoint to go on from this step, unless a loss before it was not finite."""
        if step:
            self.step.check_loss(epoch)
        self.state.epoch, self.state.step = epoch, step
        save_run(self.folder.checkpoints, self.setup, self.step.sums, self.state)

    def _progress(self, what: str, epoch: int, step: int) -> Progress:
        recipe, task, totals = self.setup.recipe, self.setup.task, self.step.sums.totals
        rate = left = math.nan
        if what == "training":
            seconds = self.clock.seconds
            rate = self.clock.rate(step, seconds)
            left = self.clock.seconds_left(step, recipe.epochs - epoch, seconds)
        means, rows = totals.means, self.state.rows
        return Progress(
            self.folder.path, what, epoch, recipe.epochs, step, self.setup.batches.steps, totals.mean_loss,
            {metric: means[metric.name] for metric in task.train_metrics}, task.headline,
            rows[-1][f"eval_{task.headline.name}"] if rows else math.nan, rate, left,
        )  # fmt: skip


def train(
    recipe: Recipe, folder: Path, *, show: Callable[[Progress], None] = lambda progress: None, **options: Any
) -> dict[str, Any]:
    """Trains a recipe in a folder to the end and returns its summary. ``options`` are those of `Trainer`."""
    trainer = Trainer(recipe, folder, show=show, **options)
    try:
        for progress in trainer.run():
            show(progress)
    finally:
        trainer.close()
    return trainer.summary


__all__ = ["Progress", "Stopped", "Trainer", "train"]
