"""Tables of the papers as rows of data, and their comparison with the figures counted by this library."""

from .row import CountedRow, PaperRow, Units
from .tables import TABLES, count_rows

__all__ = ["TABLES", "CountedRow", "PaperRow", "Units", "count_rows"]
