"""The named models of the papers as rows of data, one paper a file. Importing a file registers its models with timm."""

from . import cb, mrla, rla
from .row import ROWS, Row

__all__ = ["ROWS", "Row", "cb", "mrla", "rla"]
