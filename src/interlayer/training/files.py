"""Atomic file writes: a file is either written completely or left unchanged."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


class TrainingError(ValueError):
    """An error that the user can correct. The message is one sentence that says how."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a disk error inside the ``with`` block into a `TrainingError` that names ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TrainingError(
                f"{path} could not be written: the disk is full; what was there before is intact"
            ) from error
        raise TrainingError(f"{path} could not be written: {error.strerror or error}") from error
    except RuntimeError as error:  # torch.save reports a full disk as a RuntimeError
        if "write" not in str(error) and "enforce fail" not in str(error):
            raise
        raise TrainingError(
            f"{path} could not be written: is the disk full? What was there before is intact"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically: it holds either its previous contents or all of ``text``."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically: it holds either its previous contents or all of ``content``."""
    temporary = path.with_name(f".{path.name}.new")
    with writing(path):
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                flush(file)
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes a value as JSON, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def flush(file: IO[Any]) -> None:
    """Flushes a file to disk, past the cache of the operating system."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Flushes the entries of a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> list[Path]:
    """Creates a folder and its parents. Returns those that did not exist before, the innermost first."""
    if path.is_file():
        raise TrainingError(f"{path} is a file: choose another name for the folder")
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return missing
