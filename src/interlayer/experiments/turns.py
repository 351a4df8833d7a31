"""Alternates between runs that share a device."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from ..training import Progress, Stopped, Trainer


def in_turns(
    trainers: Iterator[Trainer], together: int, stop: Callable[[], bool] = lambda: False
) -> Generator[Progress, None, None]:
    """Runs up to ``together`` trainers at a time, one step of each in turn, and closes them.

    When one ends, the next one starts at once. If a stop is requested, no further one starts, and every active trainer
    saves a checkpoint before `Stopped` is raised.

    Args:
        trainers: the trainers, created on demand; with ``separate_random_state`` if several run at a time.
        together: the number of trainers that run at a time.
        stop: returns whether a stop is requested; called before a trainer starts.
    """
    active: list[tuple[Trainer, Iterator[Progress]]] = []
    trainers = iter(trainers)
    stopped: Stopped | None = None
    try:
        while True:
            while stopped is None and len(active) < together and (trainer := next(trainers, None)) is not None:
                if stop():
                    trainer.close()
                    stopped = Stopped("stopped before the next run")
                else:
                    active.append((trainer, trainer.run()))
            if not active:
                break
            for entry in list(active):
                trainer, steps = entry
                unloaded = trainer.loop is None  # after a stop it has nothing to save, and would load its images
                try:
                    progress = None if stopped is not None and unloaded else next(steps, None)
                except Stopped as asked:
                    stopped, progress = asked, None
                if progress is None:
                    trainer.close()
                    active.remove(entry)
                else:
                    yield progress
        if stopped is not None:
            raise stopped
    finally:
        for trainer, _ in active:
            trainer.close()
