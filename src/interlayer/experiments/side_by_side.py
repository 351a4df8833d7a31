"""Trains runs side by side, each in a process of its own.

Runs that alternate in one process (turns.py) share its interpreter: four classifiers fill a GPU together if their steps
are captured as CUDA graphs, but a network that keeps the processor busy, such as a detector, or one whose images are
augmented by the processor, is as fast alone. Processes of their own use the other cores.

A process sends its progress, its opening lines, its warnings and the time that a checkpoint took to the caller. The
runs stop together: on request, if one of them fails, and if the process of the caller is gone, each with a checkpoint.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from ..training import Progress, Recipe, Stopped, TrainingError, train
from ..training.data import open_data
from ..training.overview import Overview
from ..training.setup import available_cores
from ..training.stop import record_checkpoint, slowest_checkpoint

logger = logging.getLogger("interlayer")
ASK_SECONDS = 2.0  # at most, between two questions whether to stop
STOP_SECONDS = 60.0  # in which a process that was asked to stop has to save its checkpoint if the caller fails
SIGNALS = {signal.SIGINT, signal.SIGTERM}
Runs = Sequence[tuple[Path, Recipe]]


class _RunProcess:
    """The process of one run.

    Attributes:
        connection: receives what the run sends.
        reported: whether it has made progress since the caller last asked whether to stop.
    """

    def __init__(self, context: Any, folder: Path, recipe: Recipe, *others: Any) -> None:
        self.folder, self.reported = folder, False
        self.connection, sender = context.Pipe(duplex=False)
        # Not a daemon, which could not start workers that load images.
        arguments = (sender, os.getpid(), recipe, folder, *others)
        self.process = context.Process(target=_run, args=arguments, name=f"training in {folder}")
        with _blocked_signals():  # until it handles them, after seconds in which it imports the library
            self.process.start()
        sender.close()  # so that the connection ends with the process

    def close(self, seconds: float) -> None:
        """Waits for the process, and kills it if it takes longer."""
        with suppress(OSError):
            self.connection.close()
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def train_side_by_side(
    runs: Runs,
    number: int,
    *,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
    on_start: Callable[[Overview], None] = lambda overview: None,
    command: str = "",
) -> Generator[Progress, None, None]:
    """Trains runs, up to ``number`` at a time, and yields their progress.

    When one ends, the next one starts. If a stop is requested, or if a run fails, no further one starts, and every
    other one saves a checkpoint before `Stopped` or the error is raised.

    Args:
        runs: folders and recipes.
        number: the number of runs at a time, among which the cores of the machine are divided.
        resume: whether to resume the runs that are in the folders.
        stop: returns whether a stop is requested. It is called when every run has made a step since the last time.
        on_start: called with what each run understood.
        command: the command that reproduces the runs, for the record.
    """
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    asked = context.RawValue("b", 0)  # without a lock, which a process that is killed could hold
    cores = max(1, available_cores() // min(number, max(1, len(runs))))
    waiting, active = deque(runs), dict[Connection, _RunProcess]()
    ended: Exception | None = None
    said: set[str] = set()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # what this process has reserved is free for the others
    patience, last_asked = STOP_SECONDS, time.monotonic()
    try:
        while True:
            while ended is None and waiting and len(active) < number:
                if stop():
                    ended = Stopped("stopped before the next run")
                    asked.value = 1
                else:
                    folder, recipe = waiting.popleft()
                    recipe = recipe.replace(workers=min(recipe.workers, cores))
                    run = _RunProcess(context, folder, recipe, resume, command, asked, cores)
                    active[run.connection] = run
            if not active:
                break
            for connection in wait(list(active), timeout=ASK_SECONDS):
                run = active[connection]  # type: ignore[index]
                received = _receive(run)
                if isinstance(received, Progress):
                    run.reported = True
                    yield received
                elif isinstance(received, float):
                    record_checkpoint(received)
                elif isinstance(received, Overview):
                    on_start(received)
                elif isinstance(received, logging.LogRecord):
                    if received.getMessage() not in said:  # every run finds the same unusable images
                        said.add(received.getMessage())
                        logger.handle(received)
                else:
                    del active[run.connection]
                    run.close(STOP_SECONDS)
                    if received is not None:
                        if ended is None or (isinstance(ended, Stopped) and not isinstance(received, Stopped)):
                            ended = received
                        asked.value = 1
            now = time.monotonic()
            if all(run.reported for run in active.values()) or now - last_asked > ASK_SECONDS:
                last_asked = now
                for run in active.values():
                    run.reported = False
                if stop():
                    asked.value = 1
        if ended is not None:
            raise ended
    except KeyboardInterrupt:  # a second Ctrl-C
        patience = 0.0
        raise
    finally:
        asked.value = 1
        for run in active.values():
            run.close(patience)


def _receive(run: _RunProcess) -> Any:
    """Returns what a run sent: an error that ended it, or None if it is done, come last."""
    try:
        return run.connection.recv()
    except (EOFError, OSError):
        run.process.join(STOP_SECONDS)
        return TrainingError(_end_of(run))


def _end_of(run: _RunProcess) -> str:
    """Says how a process ended that sent nothing about it."""
    code = run.process.exitcode
    if code is not None and code < 0:
        resumed = "; its last checkpoint can be resumed" if any((run.folder / "checkpoints").glob("step_*")) else ""
        reason = ": is the memory of the machine used up?" if -code == signal.SIGKILL else ""
        return f"the process that trained {run.folder} was killed by signal {-code}{reason}{resumed}"
    return (
        f"the process that trains {run.folder} ended with exit code {code}, see its error above; a script that calls "
        f"compare(side_by_side=...) needs `if __name__ == '__main__':`"
    )


def _run(
    sender: Connection, caller: int, recipe: Recipe, folder: Path, resume: bool, command: str, asked: Any, cores: int
) -> None:
    """Trains one run in this process."""
    _ignore_signals()  # the caller gets them, too, and asks for a stop
    torch.set_num_threads(cores)

    def stop() -> bool:
        return bool(asked.value) or os.getppid() != caller

    slowest = 0.0

    def send(message: Any) -> None:
        nonlocal slowest
        with suppress(OSError):  # the caller is gone, for which the run stops
            if slowest_checkpoint() > slowest:
                slowest = slowest_checkpoint()
                sender.send(slowest)
            sender.send(message)

    def check_stop() -> None:
        if stop():  # it has nothing to save, and its first step can take long
            raise Stopped("stopped before its first step")

    def show(progress: Progress) -> None:
        send(progress)
        if progress.what.startswith("loading"):
            check_stop()

    def begin(overview: Overview) -> None:
        check_stop()
        send(overview)

    logger.addHandler(_Sending(send))
    logger.propagate = False
    try:
        check_stop()
        with _quiet():  # the caller has opened the same data
            data = open_data(recipe)
        train(recipe, folder, resume=resume, data=data, show=show, on_start=begin, command=command, stop=stop)
        send(None)
    except Stopped as stopped:
        send(stopped)
    except Exception as error:
        by_user = isinstance(error, (ValueError, OSError, ImportError))
        fewer = "; or train fewer runs at a time, with a smaller --side-by-side"
        advice = fewer if isinstance(error.__cause__, torch.OutOfMemoryError) else ""
        failure = (
            TrainingError(f"{error}{advice}") if by_user else RuntimeError(f"the run in {folder} failed: {error!r}")
        )
        failure.add_note(traceback.format_exc())  # instead of what cannot be sent
        send(failure)


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Blocks Ctrl-C and SIGTERM. A process that is started inside keeps them blocked until it handles them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows has no signals that a scheduler sends
        yield
        return
    resource_tracker.ensure_running()  # which unblocks the signals when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore_signals() -> None:
    """Ignores Ctrl-C and SIGTERM in this process, but not in programs that it starts."""
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: None)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


class _Sending(QueueHandler):
    """Sends the records of a log, formatted."""

    def __init__(self, send: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.send = send

    def enqueue(self, record: logging.LogRecord) -> None:
        self.send(record)


@contextmanager
def _quiet() -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
