"""HTML pages: the report of a run or of a comparison, and the pages of an inspection and a robustness evaluation."""

from .inspector import write_inspection
from .report import write_comparison_report, write_run_report
from .robustness import write_robustness_page

__all__ = ["write_comparison_report", "write_inspection", "write_robustness_page", "write_run_report"]
