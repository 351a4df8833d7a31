"""When a command that trains stops before its end, and what it says then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Stopping:
    """Asks a run to stop on Ctrl-C and SIGTERM, and before a budget of time is used up.

    Args:
        budget: the time from now, such as "10m"; None for no limit.
    """

    def __init__(self, budget: str | None) -> None:
        self.began, self.text = time.monotonic(), budget
        self.signal: Any = None
        self.budget: Any = None

    @contextmanager
    def listening(self) -> Iterator[Stopping]:
        """Handles signals inside the ``with`` block."""
        from interlayer.training.stop import StopSignal

        self.prepare()
        self.signal = StopSignal()
        with self.signal.listening():
            yield self

    def prepare(self) -> None:
        """Reads the budget. Raises an error if it is no time."""
        from interlayer.training.stop import TimeBudget

        if self.text is not None and self.budget is None:
            try:
                self.budget = TimeBudget(self.text, self.began)
            except ValueError as error:
                raise ValueError(f"--budget: {error}") from error

    def __call__(self) -> bool:
        return self.signal() or (self.budget is not None and self.budget())

    @property
    def exit_code(self) -> int:
        """That of the signal, or of SIGTERM if the budget is used up."""
        by_budget = self.signal.asked is None and self.budget is not None
        return self.budget.exit_code if by_budget else self.signal.exit_code

    def advice(self, folder: Path) -> str:
        """Returns the command that goes on, with the same budget."""
        from .display import command_to_resume

        budget = f" --budget {self.text}" if self.text is not None else ""
        return f"go on with: {command_to_resume(folder)}{budget}"
