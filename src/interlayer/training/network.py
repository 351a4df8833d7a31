"""The network of a recipe."""

from __future__ import annotations

from torch import nn

from ..models import build
from ..models.build import ModelError
from .recipe import Recipe, RecipeError


def build_network(recipe: Recipe, classes: int) -> nn.Module:
    """Builds the network of a recipe for `classes` classes, with the weights it starts from."""
    if not recipe.model:
        raise RecipeError("the recipe names no model: give --model NAME, or NAME+MECHANISM to attach one")
    try:
        return build.build_network(
            recipe.model,
            num_classes=classes,
            pretrained=recipe.pretrained,
            image_size=recipe.image_size,
            drop_rate=recipe.drop_rate,
            drop_path_rate=recipe.drop_path_rate,
            model_options=recipe.model_options,
            attach_options=recipe.attach_options,
            weights=recipe.weights,
            zero_head=recipe.zero_head,
            batch_norm_momentum=recipe.batch_norm_momentum,
        )
    except ModelError as error:
        raise RecipeError(str(error)) from error
