"""Training: recipes, data, the loop, checkpoints, comparison, report."""

from .compare import Comparison, compare
from .files import TrainingError
from .recipe import Recipe, RecipeError, list_recipes, load_recipe
from .report import write_comparison_report, write_run_report
from .trainer import Progress, Stopped, Trainer, train

__all__ = [
    "Comparison",
    "Progress",
    "Recipe",
    "RecipeError",
    "Stopped",
    "Trainer",
    "TrainingError",
    "compare",
    "list_recipes",
    "load_recipe",
    "train",
    "write_comparison_report",
    "write_run_report",
]
