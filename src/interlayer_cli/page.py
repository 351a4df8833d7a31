"""Pages that commands write."""

from pathlib import Path


def check_page(output: Path, *also: Path, example: str, overwrite: bool) -> None:
    """Raises if a page cannot be written, before anything is computed.

    Args:
        output: the page.
        example: the name of such a page.
        also: files that are written with it.
        overwrite: whether files that exist are replaced.
    """
    if output.suffix != ".html":
        raise ValueError(f"--output must be the name of a page, such as {example}, got {output}")
    for path in (output, *also):
        if path.exists() and not overwrite:
            raise ValueError(f"{path} exists; give --overwrite to replace it")
    if not output.parent.is_dir():
        raise ValueError(f"{output.parent}: no such folder")
