"""Experiments: comparison of networks and its statistics, evaluation, robustness and prediction."""

from .compare import Comparison, compare, networks_of
from .evaluate import evaluate
from .export import ExportError, ExportReport, export_model, export_source
from .predict import image_files, predict
from .predicted_files import PredictionFolder
from .pretrained import PretrainedNetwork, load_network
from .robustness import Robustness, robustness
from .robustness_table import robustness_table, strength_sources
from .shown_images import open_test_images, some_test_images
from .statistics import Difference, paired_difference, verdict
from .table import comparison_rows, comparison_table
from .trained import LoadedNetwork, TrainedNetwork, load_run, read_run, task_of

__all__ = [
    "Comparison",
    "Difference",
    "ExportError",
    "ExportReport",
    "LoadedNetwork",
    "PredictionFolder",
    "PretrainedNetwork",
    "Robustness",
    "TrainedNetwork",
    "compare",
    "comparison_rows",
    "comparison_table",
    "evaluate",
    "export_model",
    "export_source",
    "image_files",
    "load_network",
    "load_run",
    "networks_of",
    "open_test_images",
    "paired_difference",
    "predict",
    "read_run",
    "robustness",
    "robustness_table",
    "some_test_images",
    "strength_sources",
    "task_of",
    "verdict",
]
