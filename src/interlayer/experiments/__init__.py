"""Experiments: comparison of networks and its statistics, evaluation, robustness and prediction."""

from .compare import compare, networks_of
from .evaluate import evaluate
from .export import ExportError, ExportReport, export_model, export_source
from .predict import image_files, predict
from .predicted_files import PredictionFolder
from .pretrained import PretrainedNetwork, load_network
from .results import Comparison, Result
from .robustness import Robustness, robustness
from .robustness_table import robustness_table, strength_sources
from .shown_images import (
    ClassImages,
    ShownImages,
    open_test_images,
    sample_photographs,
    shown_images,
    some_test_images,
    whole_image,
)
from .statistics import Difference, holm, paired_difference, seeds_needed, verdict
from .stored import finished_runs, read_comparison, run_folder
from .table import comparison_rows, comparison_table
from .trained import LoadedNetwork, TrainedNetwork, load_run, read_run, task_of

__all__ = [
    "ClassImages",
    "Comparison",
    "Difference",
    "ExportError",
    "ExportReport",
    "LoadedNetwork",
    "PredictionFolder",
    "PretrainedNetwork",
    "Result",
    "Robustness",
    "ShownImages",
    "TrainedNetwork",
    "compare",
    "comparison_rows",
    "comparison_table",
    "evaluate",
    "export_model",
    "export_source",
    "finished_runs",
    "holm",
    "image_files",
    "load_network",
    "load_run",
    "networks_of",
    "open_test_images",
    "paired_difference",
    "predict",
    "read_comparison",
    "read_run",
    "robustness",
    "robustness_table",
    "run_folder",
    "sample_photographs",
    "seeds_needed",
    "shown_images",
    "some_test_images",
    "strength_sources",
    "task_of",
    "verdict",
    "whole_image",
]
