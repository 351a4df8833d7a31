"""Stop requests: how a run, its other ranks and its data loading workers handle SIGTERM, Ctrl-C and a limited time.

Schedulers and terminals send the signal to every process of a run. The main process of the run finishes the step, saves
a checkpoint and exits. Its workers must survive the signal until then. A `TimeBudget` asks for the same before its time
is up.
"""

from __future__ import annotations

import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .processes import Processes

RESERVE = 2.0  # seconds
RUNS = 4  # that may share a device and save one after another
RECENT = 30.0  # seconds after which a long step, such as the first one of a network, is forgotten
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


class _Checkpoints:
    """How long the slowest checkpoint of this process took, in seconds."""

    slowest = 0.0


def record_checkpoint(seconds: float) -> None:
    """Records how long it took to save a checkpoint, for which a `TimeBudget` keeps time in reserve."""
    _Checkpoints.slowest = max(_Checkpoints.slowest, seconds)


def slowest_checkpoint() -> float:
    """Returns the longest time that was recorded, in seconds; 0 before the first checkpoint."""
    return _Checkpoints.slowest


class TimeBudget:
    """Asks to stop before a time is up. Calling it returns whether it is time to stop.

    It is called after every step. In reserve are the time of `RUNS` checkpoints, as long as the slowest so far, and of
    the longest of the recent steps, but at least `RESERVE` seconds; and at most a fifth of the budget. Measuring a
    network, compiling it and its first step take much longer than those at the end.

    Args:
        budget: the time, such as "90s", "10m" or "1h30m".
        began: the time of the clock at which it began; now if None.
        clock: returns the current time in seconds.
    """

    def __init__(self, budget: str, began: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.clock = parse_duration(budget), clock
        self.last = clock()
        self.began = self.last if began is None else began
        self.steps: deque[tuple[float, float]] = deque()  # when recent steps ended, and how long they took
        self.spent = False

    def __call__(self) -> bool:
        now = self.clock()
        self.steps.append((now, now - self.last))
        self.last = now
        while self.steps[0][0] < now - RECENT:
            self.steps.popleft()
        step = max(seconds for _, seconds in self.steps)
        reserve = min(max(RESERVE, RUNS * slowest_checkpoint() + step), self.seconds / 5)
        self.spent = self.spent or now + reserve >= self.began + self.seconds
        return self.spent

    @property
    def exit_code(self) -> int:
        """That of a process that SIGTERM ended, because the run is not finished."""
        return 128 + signal.SIGTERM


def parse_duration(text: str) -> float:
    """Returns a time in seconds.

    >>> parse_duration("90s"), parse_duration("10m"), parse_duration("1h30m")
    (90.0, 600.0, 5400.0)
    """
    found = re.fullmatch(r"(?:(\d+\.?\d*)h)?(?:(\d+\.?\d*)m)?(?:(\d+\.?\d*)s)?", text.strip())
    parts = found.groups(default="0") if found else ("0",) * 3
    seconds = sum(float(part) * unit for part, unit in zip(parts, (3600.0, 60.0, 1.0), strict=True))
    if seconds <= 0:
        raise ValueError(f"expected a time such as 90s, 10m or 1h30m, got {text!r}")
    return seconds


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

    def at_once(self) -> bool:
        """Whether to stop where ranks do not synchronize, which only a single process can."""
        return self.processes.world_size == 1 and self.asked()


def prepare_worker_signals() -> None:
    """Makes a data loading worker ignore Ctrl-C and survive the first SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _survive_once)


def _survive_once(number: int, frame: FrameType | None) -> None:
    """Ignores one SIGTERM. A second one ends the worker: Python ends hanging workers in this way when the run exits."""
    signal.signal(number, signal.SIG_DFL)
