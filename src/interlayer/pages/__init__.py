"""Pages that a browser shows."""

from .report import write_comparison_report, write_run_report

__all__ = ["write_comparison_report", "write_run_report"]
