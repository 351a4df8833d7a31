"""Freezing: training new parameters alone, while those that came from trained weights keep their values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..models.origin import Origin
from .recipe import Recipe, RecipeError


@dataclass
class Freeze:
    """The frozen modules of a network, and for how long they are frozen.

    Frozen parameters have no gradient, so the optimizer skips them. Frozen batch norms use their running statistics and
    do not update them. Dropout and stochastic depth act as usual.

    Args:
        parameters: the parameters that came from trained weights.
        norms: the modules with running statistics that came from trained weights.
        steps: the number of steps for which they are frozen.
        active: whether they are frozen now.
    """

    parameters: Sequence[nn.Parameter] = ()
    norms: Sequence[nn.Module] = ()
    steps: float = 0
    active: bool = False

    def covers(self, step: int) -> bool:
        """Whether the modules are frozen at this step of the run."""
        return step < self.steps

    def set(self, active: bool) -> None:
        """Freezes the parameters, or trains them again."""
        self.active = active
        for parameter in self.parameters:
            parameter.requires_grad_(not active)

    def set_modes(self) -> None:
        """Puts frozen batch norms into eval mode. Call this after `nn.Module.train`."""
        if self.active:
            for norm in self.norms:
                norm.eval()


def make_freeze(recipe: Recipe, network: nn.Module, origin: Origin, steps: int) -> Freeze:
    """Returns what the recipe freezes.

    Args:
        steps: number of steps in an epoch.
    """
    if not (recipe.freeze_backbone or recipe.freeze_epochs):
        return Freeze()
    key = "freeze_backbone=true" if recipe.freeze_backbone else f"freeze_epochs={recipe.freeze_epochs:g}"
    if not origin.new_parameters(network):
        raise RecipeError(
            f"{key} leaves nothing to train: all parameters of {recipe.model} came from {origin.source}; attach a "
            f"mechanism, or set zero_head=true for a new classifier"
        )
    return Freeze(
        parameters=[p for name, p in network.named_parameters() if name in origin.loaded],
        norms=[m for name, m in network.named_modules() if f"{name}.running_mean".lstrip(".") in origin.loaded],
        steps=math.inf if recipe.freeze_backbone else round(recipe.freeze_epochs * steps),
    )


def check_fine_tuning(recipe: Recipe) -> None:
    """Raises if the recipe distinguishes new parameters from loaded ones, but loads none."""
    if recipe.fine_tuning_keys and not (recipe.pretrained or recipe.weights):
        given = ", ".join(f"{key}={_written(value)}" for key, value in recipe.fine_tuning_keys.items())
        needs = "need" if len(recipe.fine_tuning_keys) > 1 else "needs"
        without = " ".join(f"{key}={_written(getattr(Recipe, key))}" for key in recipe.fine_tuning_keys)
        raise RecipeError(
            f"{given} {needs} trained weights to start from: give pretrained=true or weights=FILE, or train from "
            f"scratch with {without}"
        )


def _written(value: Any) -> str:
    return "null" if value is None else str(value).lower()
