"""The papers' tables as rows of data, and the check that prints them beside the figures counted here."""

from .row import CountedRow, PaperRow, Units
from .tables import TABLES, count_rows

__all__ = ["TABLES", "CountedRow", "PaperRow", "Units", "count_rows"]
