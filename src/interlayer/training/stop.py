"""Stop signals: what SIGTERM and Ctrl-C do to a run, to its other ranks, and to the workers that load its images.

Schedulers and terminals send the signal to every process of a run. The run's own process notes it, finishes the step,
saves a checkpoint and exits; its workers must outlive the signal until then.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .processes import Processes

AGREE_STEPS = 20  # steps between agreements of several ranks to stop


class Stopped(Exception):  # noqa: N818  not an error: the run was asked to stop and did
    """The run saved a checkpoint and stopped where it was asked to."""


class StopSignal:
    """Listens for Ctrl-C and SIGTERM. Calling it says whether a stop was asked for; a second Ctrl-C insists."""

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
        return 128 + (self.asked or signal.SIGINT)


class StopRequest:
    """Asks whether to stop, so that all ranks stop at the same step.

    Args:
        asked: called after every step.
        processes: the ranks, which agree every `AGREE_STEPS` steps and at the end of an epoch.
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
    """In a worker that loads images: ignores Ctrl-C, and outlives the first SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _outlive_one)


def _outlive_one(number: int, frame: FrameType | None) -> None:
    """Lets a second SIGTERM end the worker: that is how Python ends a worker that hangs when the run exits."""
    signal.signal(number, signal.SIG_DFL)
