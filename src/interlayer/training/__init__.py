"""Training: recipes, data, the trainer and checkpoints."""

from .files import TrainingError
from .recipe import Recipe, RecipeError, list_recipes, load_recipe
from .trainer import Progress, Stopped, Trainer, train

__all__ = [
    "Progress",
    "Recipe",
    "RecipeError",
    "Stopped",
    "Trainer",
    "TrainingError",
    "list_recipes",
    "load_recipe",
    "train",
]
