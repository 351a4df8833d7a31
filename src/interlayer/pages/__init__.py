"""HTML pages: the report of a run or of a comparison, and the page of a robustness evaluation."""

from .report import write_comparison_report, write_run_report
from .robustness import write_robustness_page

__all__ = ["write_comparison_report", "write_robustness_page", "write_run_report"]
