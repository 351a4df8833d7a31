"""Experiments: comparison of networks and its statistics, evaluation and prediction."""

from .compare import Comparison, compare, networks_of
from .evaluate import evaluate
from .export import ExportError, ExportReport, export_model, export_source
from .predict import image_files, predict
from .source import SourceNetwork, source_network
from .statistics import Difference, paired_difference, verdict
from .table import comparison_rows, comparison_table
from .trained import TrainedNetwork, read_run, task_of

__all__ = [
    "Comparison",
    "Difference",
    "ExportError",
    "ExportReport",
    "SourceNetwork",
    "TrainedNetwork",
    "compare",
    "comparison_rows",
    "comparison_table",
    "evaluate",
    "export_model",
    "export_source",
    "image_files",
    "networks_of",
    "paired_difference",
    "predict",
    "read_run",
    "source_network",
    "task_of",
    "verdict",
]
