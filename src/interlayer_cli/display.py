"""Progress on the terminal: live progress bars, or one line per epoch if the output is not a terminal."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .train import is_main_process


def command_line() -> str:
    """Returns the current command, for reproducing a run."""
    return shlex.join([*_program(), *sys.argv[1:]])


def _program() -> list[str]:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        return ["interlayer"]
    here = os.environ.get("LOCAL_WORLD_SIZE", str(processes))
    return ["torchrun", "--nproc-per-node", here, "-m", "interlayer"]


def command_to_resume(folder: Path) -> str:
    """Returns the command that resumes the run or the comparison in `folder`."""
    return shlex.join([*_program(), "resume", str(folder)])


@contextmanager
def showing(total_runs: int = 1, root: Path | None = None) -> Iterator[Any]:
    """Yields a function that displays a `Progress`. Of several processes, only rank 0 displays it.

    Args:
        total_runs: the number of runs.
        root: the folder that contains the folders of the runs, if there are several.
    """
    from rich.console import Console

    if not is_main_process():
        yield lambda progress: None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(root)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=console, transient=True, refresh_per_second=8) as bars:
        yield _Bars(bars, total_runs, root)


@contextmanager
def counting(description: str) -> Iterator[Any]:
    """Yields a function that displays how many of a number of things are done, if stderr is a terminal.

    Its arguments are the number of those that are done, that of all, and what is being done, if it varies.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total, what=description: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=8) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total, what=description: bar.update(task, completed=done, total=total, description=what)


def _name(progress: Any, root: Path | None) -> str:
    if root is None:
        return progress.folder.name
    return str(progress.folder.relative_to(root)) if progress.folder != root else progress.folder.name


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else form.format(value)


def _metrics(progress: Any, *, short: bool = False) -> list[str]:
    """Formats the training metrics of the epoch so far and the headline metric of the last evaluation."""
    shown = [(metric.title, metric.format(value, short=short)) for metric, value in progress.metrics.items()]
    if progress.headline is not None:
        name = "held out" if progress.headline in progress.metrics else f"held-out {progress.headline.title}"
        shown.append((name, progress.headline.format(progress.held_out, short=short)))
    return [f"{name} {value}" for name, value in shown if value]


class _Bars:
    """A progress bar for each active run, and one for the number of finished runs."""

    def __init__(self, bars: Any, total_runs: int, root: Path | None) -> None:
        self.bars, self.root = bars, root
        self.tasks: dict[Path, Any] = {}
        self.shown: dict[Path, float] = {}
        self.total = bars.add_task("runs", total=total_runs, text="") if total_runs > 1 else None

    def __call__(self, progress: Any) -> None:
        if progress.what == "done":
            if progress.folder in self.tasks:
                self.bars.remove_task(self.tasks.pop(progress.folder))
            if self.total is not None:
                self.bars.update(self.total, advance=1)
            return
        if progress.folder != self.root and self.root in self.tasks:  # the phase before the runs is over
            self.bars.remove_task(self.tasks.pop(self.root))
        now = time.monotonic()
        known = progress.folder in self.tasks
        if known and now - self.shown[progress.folder] < 0.1 and progress.step != progress.steps:
            return
        self.shown[progress.folder] = now
        if not known:
            self.tasks[progress.folder] = self.bars.add_task("", total=None, text="")
        name = _name(progress, self.root)
        has_epochs = name != progress.what and not progress.what.startswith(("loading", "measuring", "timing"))
        epoch = f" epoch {progress.epoch + 1}/{progress.epochs}" if has_epochs else ""
        texts = [
            progress.what if name != progress.what else "",
            _number(progress.images_per_second, "{:,.0f} images/s"),
            _number(progress.loss, "loss {:.3f}"),
            *_metrics(progress, short=True),
            f"{_clock(progress.seconds_left)} left" if not math.isnan(progress.seconds_left) else "",
        ]
        self.bars.update(
            self.tasks[progress.folder],
            description=name + epoch,
            completed=progress.step,
            total=progress.steps or None,
            text="  ".join(text for text in texts if text),
        )


class _Lines:
    """One line per epoch, for log files."""

    def __init__(self, root: Path | None) -> None:
        self.root = root
        self.trained: dict[Path, Any] = {}  # the last training progress of each run, which has the speed

    def __call__(self, progress: Any) -> None:
        if progress.what == "training" and progress.step == progress.steps:
            self.trained[progress.folder] = progress
        if progress.what != "evaluated":
            return
        shown = [
            f"{_name(progress, self.root)}: epoch {progress.epoch + 1}/{progress.epochs}",
            f"loss {progress.loss:.4f}",
            *_metrics(progress),
        ]
        trained = self.trained.get(progress.folder)
        if trained is not None:  # not where a run was stopped in an evaluation, which is the first thing it repeats
            shown += [f"{trained.images_per_second:,.0f} images/s", f"{_clock(trained.seconds_left)} left"]
        print(", ".join(shown), file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def new_folder(name: str) -> Path:
    """Returns the path of a new folder under runs/, named after the time and ``name``."""
    base = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{file_name(name)}"
    folder, number = base, 1
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


def file_name(name: str) -> str:
    """Returns the name of a model as the name of a file: local-dir:FOLDER contains slashes and a colon."""
    return re.sub(r"[/\\:]+", "-", name)


def log_to_stderr() -> None:
    """Prints warnings of the library to stderr, one line each.

    Of several processes, rank 0 prints those that all of them log. The others print only what they alone know, which is
    marked with the attribute ``only_this_rank``.
    """
    import logging

    handler = logging.StreamHandler()
    if not is_main_process():
        handler.addFilter(lambda record: getattr(record, "only_this_rank", False))
    handler.setFormatter(logging.Formatter("interlayer: %(message)s"))
    logger = logging.getLogger("interlayer")
    if not logger.handlers:
        logger.addHandler(handler)
        logger.propagate = False
