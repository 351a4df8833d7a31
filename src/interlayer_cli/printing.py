"""Conversion of plain tables to rich tables."""

from __future__ import annotations

from typing import Any


def rich_table(table: Any, *, align_right: bool = False) -> Any:
    """Converts the table of a task or an experiment to a rich table.

    Args:
        table: an `interlayer.tasks.Table`.
        align_right: whether all columns but the first are right-aligned.
    """
    from rich.table import Table
    from rich.text import Text

    made = Table(title=table.title or None, caption=table.note or None)
    for index, column in enumerate(table.columns):
        made.add_column(column, justify="right" if align_right and index else "left", overflow="fold")
    for row in table.rows:
        made.add_row(*(Text(cell) for cell in row))  # names of classes and files can contain markup
    return made
