"""HTML pages: the report of a run or of a comparison."""

from .report import write_comparison_report, write_run_report

__all__ = ["write_comparison_report", "write_run_report"]
