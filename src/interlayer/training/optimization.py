"""The optimizer and the learning rate schedule of a recipe."""

from __future__ import annotations

from typing import Any

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import nn

from ..hosts.finding.probe import reason
from .files import TrainingError
from .recipe import Recipe

FUSED = {"sgd", "momentum", "adam", "adamw"}  # optimizers with a fused implementation in PyTorch


def make_optimizer(recipe: Recipe, network: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Creates the recipe's optimizer with timm. On a GPU, a fused implementation is used if PyTorch has one."""
    options = dict(recipe.optimizer_options)
    if device.type == "cuda" and recipe.optimizer in FUSED and recipe.sharding == "none":
        options.setdefault("fused", True)
    try:
        return create_optimizer_v2(
            network,
            opt=recipe.optimizer,
            lr=recipe.scaled_lr,
            weight_decay=recipe.weight_decay,
            momentum=recipe.momentum,
            filter_bias_and_bn=not recipe.decay_norms_and_biases,
            **{key: tuple(value) if isinstance(value, list) else value for key, value in options.items()},
        )
    except (ValueError, TypeError, AssertionError, RuntimeError) as error:
        known = ", ".join(sorted(timm.optim.list_optimizers()))
        message = f"optimizer={recipe.optimizer} cannot be made: {reason(error)}; timm knows {known}"
        raise TrainingError(message) from error


def make_scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Creates the recipe's learning rate schedule with timm. Returns None if the learning rate never changes.

    Args:
        steps: number of steps in an epoch.
    """
    if recipe.schedule == "constant" and not recipe.warmup_epochs:
        return None
    by_epoch = recipe.schedule_on == "epoch"
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched={"constant": "multistep"}.get(recipe.schedule, recipe.schedule),
        num_epochs=recipe.epochs,
        decay_epochs=recipe.decay_epochs,  # type: ignore[arg-type]
        # timm's multistep looks one epoch ahead: with a milestone of 150, it would decay at the start of epoch 149
        decay_milestones=[] if recipe.schedule == "constant" else [m + by_epoch for m in recipe.milestones],
        decay_rate=recipe.decay_rate,
        min_lr=recipe.scaled_min_lr,
        warmup_lr=recipe.warmup_lr,
        warmup_epochs=recipe.warmup_epochs,  # type: ignore[arg-type]
        step_on_epochs=by_epoch,
        updates_per_epoch=steps,
    )
    return scheduler
