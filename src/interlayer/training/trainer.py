"""A run from its first step to its last.

A `Trainer` is one run in one folder. `Trainer.run` is a generator that yields after every step: `train` drains one, and
a comparison alternates between several, each on a CUDA stream of its own, so that small networks fill the GPU together.
See setup.py for what a run consists of, step.py for what a step computes, checkpoint.py for what is saved and resumed,
and run_folder.py for who owns the folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch

from ..analysis import TaskContribution, task_contribution
from ..tasks import Scores
from .checkpoint import RunState, restore_run, save_run
from .data import Data, EvalBatches, open_batches
from .evaluation import check_finite_loss, evaluate_setup
from .isolation import isolated, random_state, restore_random_state
from .logs import Logs, check_logs, epoch_row
from .memory import explaining_out_of_memory
from .overview import Overview, overview_of
from .processes import Processes, init_processes
from .progress import EpochClock, Progress, run_progress
from .recipe import Recipe
from .run_folder import RunFolder
from .setup import TrainingSetup, set_up
from .step import TrainStep
from .stop import Stopped, StopRequest
from .summary import run_summary, write_results


class Trainer:
    """Trains one recipe in one folder.

    Args:
        recipe: what to train and how.
        folder: the folder for the files of the run.
        resume: whether to resume the run that is in the folder, if there is one.
        data: the data, if several runs share it.
        processes: the ranks and their devices, if several runs share them.
        stop: called after every step; if it returns True, a checkpoint is saved and `Stopped` is raised.
        show: called with the progress of loading images, which happens between two steps of `run`.
        on_start: called on rank 0 with what the run understood, before its first step.
        command: the command that reproduces this run, for the record.
        separate_random_state: whether the run keeps its random state to itself between steps, for runs that alternate.

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
        on_start: Callable[[Overview], None] = lambda overview: None,
        command: str = "",
        separate_random_state: bool = False,
    ) -> None:
        self.recipe, self.resume, self.data, self.show, self.command = recipe, resume, data, show, command
        self.processes = processes or init_processes(recipe)
        self.folder = RunFolder(folder, recipe, self.processes, resume=resume)
        self.stop = StopRequest(stop, self.processes)
        self.separate_random_state, self.on_start = separate_random_state, on_start
        self.stream = torch.cuda.Stream() if self.processes.device.type == "cuda" else None
        self.loop: TrainingLoop | None = None

    def run(self) -> Iterator[Progress]:
        """Trains to the end and yields after every step. The last progress has ``what == "done"``."""
        separate = self.separate_random_state
        with explaining_out_of_memory(self.recipe):
            yield from isolated(self._run(), self.processes.device, self.stream, separate_random_state=separate)

    def _run(self) -> Iterator[Progress]:
        recipe, path = self.recipe, self.folder.path
        yield Progress(path, "loading", 0, recipe.epochs, 0, 0)
        check_logs(recipe)

        def report(what: str, done: int, total: int) -> None:
            self.show(Progress(path, what, 0, recipe.epochs, done, total))

        setup = set_up(recipe, self.processes, self.data, report)
        self.loop = TrainingLoop(setup, self.folder, self.stop, self.stream, resume=self.resume, command=self.command)
        if self.processes.is_main:
            self.on_start(overview_of(setup, epoch=self.loop.state.epoch, step=self.loop.state.step))
        yield from self.loop.run()

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of summary.json; empty until the run is done."""
        return self.loop.summary if self.loop is not None else {}

    def close(self) -> None:
        """Releases the folder and the memory of the GPU."""
        if self.loop is not None:
            self.loop.close()
        self.folder.release()


class TrainingLoop:
    """The epochs of a run, from the step at which it starts or resumes to the final test.

    Attributes:
        setup: the network, the batches, the optimizer and everything else that a step needs.
        step: runs training steps and accumulates the sums of an epoch.
        state: the position, the log and the best weights of the run.
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
        self.setup, self.folder, self.stop, self.command = setup, folder, stop, folder.command or command
        self.step = TrainStep(setup, stream)
        self.state = restore_run(folder.checkpoints, setup, self.step.sums) if resume else RunState()
        self.clock = EpochClock(self.state.step, setup.batches.steps, setup.recipe.batch_size)
        self.summary: dict[str, Any] = {}
        self.logs: Logs | None = None
        if setup.processes.is_main:  # the first files of the run: an error before this point leaves none behind
            folder.write_recipe(setup.recipe, command)
            self.logs = Logs(folder.path, setup.recipe, setup.task, self.state.rows)

    def run(self) -> Iterator[Progress]:
        """Trains and evaluates every epoch, then tests the chosen weights."""
        for epoch in range(self.state.epoch, self.setup.recipe.epochs):
            yield from self._train(epoch)
            yield from self._evaluate_epoch(epoch)
        yield from self._test()

    def close(self) -> None:
        """Frees the captured step, ends the workers that load images and closes the logs."""
        self.step.release()
        self.setup.batches.close()
        if self.logs is not None:
            self.logs.close()

    def _train(self, epoch: int) -> Iterator[Progress]:
        setup, sums, start = self.setup, self.step.sums, self.state.step
        steps, every = setup.batches.steps, setup.recipe.checkpoint_steps
        if start == 0:
            sums.restart(0)
        setup.train()
        self.clock = EpochClock(start, steps, setup.recipe.batch_size, self.state.epoch_seconds)
        if start == steps:  # the run was stopped in the evaluation after this epoch
            setup.set_lr(epoch, steps - 1)
            self.step.check_loss(epoch)
            return
        with open_batches(setup.batches.epoch(epoch, start)) as batches:
            for step in range(start, steps):
                setup.set_lr(epoch, step)
                if setup.update_freeze(epoch, step):
                    self.step.restart()
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
        setup, state = self.setup, self.state
        if setup.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self.clock.stop()
        totals, began = self.step.sums.totals, time.perf_counter()
        scores = None
        if (epoch + 1) % setup.recipe.eval_every == 0 or epoch + 1 == setup.recipe.epochs:
            scores = yield from self._evaluate(setup.held_out, "evaluating", epoch)
        row = epoch_row(setup, epoch, totals, scores, self.clock, time.perf_counter() - began)
        state.rows.append(row)
        state.seconds += row["seconds"] + row["eval_seconds"]
        if scores is not None:
            check_finite_loss(setup.task, scores, epoch)
            state.keep_best(setup, row)
        if self.logs is not None:
            self.logs.add(row)
        self._save(epoch + 1, 0)
        yield self._progress("evaluated", epoch, setup.batches.steps)
        if self.stop(0, epoch_ended=True) and epoch + 1 < setup.recipe.epochs:
            raise Stopped(f"stopped at the end of epoch {epoch + 1}")

    def _test(self) -> Iterator[Progress]:
        """Tests the chosen weights once and writes the results."""
        setup, epochs, batches = self.setup, self.setup.recipe.epochs, self.setup.held_out
        if self.state.best_weights is not None:
            batches = setup.test_batches()
            setup.load_evaluated_weights(self.state.best_weights)
        measured = task_contribution(setup.task, setup.evaluated_network)
        scores = yield from self._evaluate(batches, "testing", epochs - 1, records=True, contribution=measured)
        contribution = None if measured is None else measured.result(scores, setup.processes)
        self.summary = run_summary(setup, self.state, scores, self.command, contribution)
        write_results(self.folder.path, setup, scores, self.summary)
        yield self._progress("done", epochs, setup.batches.steps)

    def _evaluate(
        self,
        batches: EvalBatches,
        what: str,
        epoch: int,
        *,
        records: bool = False,
        contribution: TaskContribution | None = None,
    ) -> Generator[Progress, None, Scores]:
        """Evaluates the network or its moving average, yields after every batch, and returns the scores.

        If a stop is requested, the evaluation is left, and begins again when the run is resumed.
        """
        scores, device = None, self.setup.device
        before = random_state(device)  # workers that load images draw a seed
        evaluation = evaluate_setup(self.setup, batches, records=records, contribution=contribution)
        for scores in evaluation:
            if scores is None and self.stop.at_once():
                evaluation.close()
                restore_random_state(before, device)
                if what == "evaluating":  # the checkpoint before the test is that of the end of the last epoch
                    self._save(epoch, self.setup.batches.steps)
                where = "evaluation" if what == "evaluating" else "test"
                raise Stopped(f"stopped at the {where} after epoch {epoch + 1}")
            yield self._progress(what, epoch, self.setup.batches.steps)
        assert scores is not None, "evaluate_setup yields the scores last"
        return scores

    def _save(self, epoch: int, step: int) -> None:
        """Writes a checkpoint that resumes at this step; raises if a loss before it was not finite."""
        if step:
            self.step.check_loss(epoch)
        self.state.epoch, self.state.step = epoch, step
        self.state.epoch_seconds = self.clock.epoch_seconds if step else 0.0
        save_run(self.folder.checkpoints, self.setup, self.step.sums, self.state)

    def _progress(self, what: str, epoch: int, step: int) -> Progress:
        totals, rows = self.step.sums.totals, self.state.rows
        return run_progress(self.setup, self.folder.path, what, epoch, step, totals, rows, self.clock)


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
