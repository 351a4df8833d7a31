"""Named models of the papers as rows of data, one file per paper. Importing a file registers its models with timm."""

from . import cb, mrla, rla
from .row import ROWS, Row

__all__ = ["ROWS", "Row", "cb", "mrla", "rla"]
