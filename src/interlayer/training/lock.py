"""The lock of a folder: one run at a time."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from .files import TrainingError, make_folder, writing

_held: set[FolderLock] = set()


def close_locks() -> None:
    """In a forked process: closes the locks of its parent, which keeps them."""
    for lock in list(_held):
        lock.file.close()
    _held.clear()


class FolderLock:
    """Held by the one run of a folder. The system releases it when the process dies, however it dies."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self.path = folder / ".lock"
        with writing(self.path):
            self.file = open(self.path, "a+")  # noqa: SIM115  held until release
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.file.seek(0)
            owner = self.file.read().strip() or "another process"
            self.file.close()
            raise TrainingError(
                f"{folder} is in use by {owner}: wait for it, stop it, or choose another folder"
            ) from None
        with writing(self.path):
            self.file.truncate(0)
            self.file.write(f"process {os.getpid()}")
            self.file.flush()
        _held.add(self)

    def release(self, *, remove: bool = False) -> None:
        """Releases the lock.

        Args:
            remove: whether to remove the lock's own file too, and the folder if that leaves it empty.
        """
        _held.discard(self)
        if self.file.closed:
            return
        if remove:
            with suppress(OSError):
                self.path.unlink()
                self.path.parent.rmdir()
        fcntl.flock(self.file, fcntl.LOCK_UN)
        self.file.close()
