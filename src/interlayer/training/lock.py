"""The lock of a run folder, which only one run can hold at a time."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from .files import TrainingError, make_folder, writing

_held: set[FolderLock] = set()


def close_locks() -> None:
    """Closes inherited locks in a forked process. The parent process keeps holding them."""
    for lock in list(_held):
        lock.file.close()
    _held.clear()


class FolderLock:
    """An exclusive lock on a folder. The operating system releases it when the process ends, even by SIGKILL."""

    def __init__(self, folder: Path) -> None:
        self.created = make_folder(folder)
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
            remove: whether to remove the lock file as well, the folder if it is then empty, and the parents that were
                created with it.
        """
        _held.discard(self)
        if self.file.closed:
            return
        if remove:
            with suppress(OSError):
                self.path.unlink()
                self.path.parent.rmdir()
                for parent in self.created[1:]:
                    parent.rmdir()
        fcntl.flock(self.file, fcntl.LOCK_UN)
        self.file.close()
