"""Tables of plain values, printed on a terminal."""

from __future__ import annotations

from typing import Any


def rich_table(table: Any, *, align_right: bool = False) -> Any:
    """Returns a task's or an experiment's table as rich prints it.

    Args:
        table: an `interlayer.tasks.Table`.
        align_right: whether all columns but the first are right-aligned.
    """
    from rich.table import Table
    from rich.text import Text

    made = Table(title=table.title or None, caption=table.note or None)
    for index, column in enumerate(table.columns):
        made.add_column(column, justify="right" if align_right and index else "left")
    for row in table.rows:
        made.add_row(*(Text(cell) for cell in row))  # a class or a file may be called anything
    return made
