"""Runs that share a device take turns: a step of each."""

from __future__ import annotations

from collections.abc import Iterator

from ..training import Progress, Stopped, Trainer


def in_turns(trainers: Iterator[Trainer], together: int) -> Iterator[Progress]:
    """Runs trainers, up to `together` at a time, a step of each in turn, and closes them.

    Where the trainers are asked to stop, each saves a checkpoint before `Stopped` is raised.

    Args:
        trainers: made one by one, as their turn comes; with `separate_random_state` if several run at a time.
        together: how many run at a time.
    """
    active: list[tuple[Trainer, Iterator[Progress]]] = []
    trainers = iter(trainers)
    stopped: Stopped | None = None
    try:
        while True:
            while stopped is None and len(active) < together and (trainer := next(trainers, None)) is not None:
                active.append((trainer, trainer.run()))
            if not active:
                break
            for entry in list(active):
                trainer, steps = entry
                try:
                    progress = next(steps, None)
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
