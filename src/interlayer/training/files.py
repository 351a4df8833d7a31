"""Files of a run: whole or not there, and one run to a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


class TrainingError(ValueError):
    """What a user can put right; the message is one sentence that says how."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the disk into a sentence that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TrainingError(
                f"{path} could not be written: the disk is full; what was there before is intact"
            ) from error
        raise TrainingError(f"{path} could not be written: {error.strerror or error}") from error
    except RuntimeError as error:  # torch.save's own streams report a full disk so
        if "write" not in str(error) and "enforce fail" not in str(error):
            raise
        raise TrainingError(
            f"{path} could not be written: is the disk full? What was there before is intact"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write `path` so that it holds either what it held or all of `text`."""
    temporary = path.with_name(f".{path.name}.new")
    with writing(path):
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                flush(file)
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def flush(file: IO[Any]) -> None:
    """Onto the disk, not only into the system's memory."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


_held: set[FolderLock] = set()


def close_locks() -> None:
    """In a forked process: let go of the locks of the process it came from, which keeps them."""
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
        """Let the folder go; `remove` also takes away the lock's own file, and the folder if it is empty then."""
        _held.discard(self)
        if self.file.closed:
            return
        if remove:
            with suppress(OSError):
                self.path.unlink()
                self.path.parent.rmdir()
        fcntl.flock(self.file, fcntl.LOCK_UN)
        self.file.close()
