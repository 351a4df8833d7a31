"""Files that are either written whole or left as they were."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


class TrainingError(ValueError):
    """Something that the user can put right; the message is one sentence that says how."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an error of the disk into a sentence that names ``path``."""
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
    """Writes a file so that it holds either what it held before or all of ``text``."""
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
    """Writes a file to the disk, not only to the system's memory."""
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
