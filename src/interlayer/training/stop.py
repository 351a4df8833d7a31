"""Stop signals: how a run, its other ranks and its data loading workers handle SIGTERM and Ctrl-C.

Schedulers and terminals send the signal to every process of a run. The main process of the run finishes the step, saves
a checkpoint and exits. Its workers must survive the signal until then.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .processes import Processes

AGREE_STEPS = 20  # number of steps between two synchronizations of the stop request over ranks


class Stopped(Exception):  # noqa: N818  not an error: the run was asked to stop
    """Raised when a run has saved a checkpoint and stopped on request."""


class StopSignal:
    """Records Ctrl-C and SIGTERM. Calling it returns whether one was received. A second Ctrl-C stops immediately."""

    def __init__(self) -> None:
        self.asked: int | None = None

    def __call__(self) -> bool:
        return self.asked is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = number

    @contextmanager
    def listening(self) -> Iterator[StopSignal]:
        """Handles the signals inside the ``with`` block."""
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """The exit code of a process that the signal ended: 128 plus the number of the signal."""
        return 128 + (self.asked or signal.SIGINT)


class StopRequest:
    """Decides whether to stop, so that all ranks stop at the same step.

    Args:
        asked: called after every step; returns whether this rank should stop.
        processes: the ranks, which synchronize every `AGREE_STEPS` steps and at the end of an epoch.
    """

    def __init__(self, asked: Callable[[], bool], processes: Processes) -> None:
        self.asked, self.processes = asked, processes

    def __call__(self, step: int, *, epoch_ended: bool) -> bool:
        asked = self.asked()
        if self.processes.world_size == 1:
            return asked
        if step % AGREE_STEPS and not epoch_ended:
            return False
        return self.processes.any(asked)


def prepare_worker_signals() -> None:
    """Makes a data loading worker ignore Ctrl-C and survive the first SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _survive_once)


def _survive_once(number: int, frame: FrameType | None) -> None:
    """Ignores one SIGTERM. A second one ends the worker: Python ends hanging workers in this way when the run exits."""
    signal.signal(number, signal.SIG_DFL)
