"""The optimizer and the learning rate schedule of a recipe."""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
import torch
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from torch import nn

from ..hosts.finding.probe import reason
from ..models.origin import Origin, new_mechanism_parameters
from .files import TrainingError
from .recipe import Recipe, RecipeError

FUSED = {"sgd", "momentum", "adam", "adamw"}  # optimizers with a fused implementation in PyTorch


def make_optimizer(
    recipe: Recipe, network: nn.Module, device: torch.device, origin: Origin | None = None
) -> torch.optim.Optimizer:
    """Creates the recipe's optimizer with timm. On a GPU, a fused implementation is used if PyTorch has one.

    Args:
        origin: tells new parameters, which have their own learning rate, from loaded ones.
    """
    options = dict(recipe.optimizer_options)
    if recipe.new_lr_scale != 1.0 or recipe.mechanism_lr_scale is not None or recipe.layer_decay is not None:
        options["param_group_fn"] = partial(parameter_groups, recipe, origin=origin or Origin())
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
    except RecipeError:
        raise
    except (ValueError, TypeError, AssertionError, RuntimeError) as error:
        known = ", ".join(sorted(timm.optim.list_optimizers()))
        message = f"optimizer={recipe.optimizer} cannot be made: {reason(error)}; timm knows {known}"
        raise TrainingError(message) from error


def parameter_groups(recipe: Recipe, network: nn.Module, *, origin: Origin) -> list[dict[str, Any]]:
    """Returns groups of parameters, whose ``lr_scale`` timm's schedules multiply with the learning rate.

    The learning rate of loaded parameters decays by ``layer_decay`` from each layer to the one before it, as computed
    by timm. The learning rate of new parameters, wherever they are, is multiplied by ``new_lr_scale``, and that of the
    parameters of new mechanisms by ``mechanism_lr_scale`` if it is given.
    """
    options: dict[str, Any] = {
        "weight_decay": recipe.weight_decay,
        "weight_decay_exclude_1d": not recipe.decay_norms_and_biases,
        "no_weight_decay_list": getattr(network, "no_weight_decay", set)(),
    }
    if recipe.layer_decay is None:
        groups = param_groups_weight_decay(network, **options)
    elif hasattr(network, "group_matcher"):
        groups = param_groups_layer_decay(network, layer_decay=recipe.layer_decay, **options)
    else:
        raise RecipeError(
            f"layer_decay={recipe.layer_decay} needs a network that numbers its layers by timm's group_matcher, which "
            f"{recipe.model} does not have"
        )
    scales = {id(parameter): recipe.new_lr_scale for parameter in origin.new_parameters(network).values()}
    if recipe.mechanism_lr_scale is not None:
        for parameter in new_mechanism_parameters(network, origin):
            scales[id(parameter)] = recipe.mechanism_lr_scale
    split = []
    for group in groups:
        parts: dict[tuple[bool, float], list[nn.Parameter]] = {}  # whether they are new, and their scale
        for parameter in group["params"]:
            scale = scales.get(id(parameter), group.get("lr_scale", 1.0))
            parts.setdefault((id(parameter) in scales, scale), []).append(parameter)
        split += [{**group, "params": parts[key], "lr_scale": key[1]} for key in sorted(parts)]
    return split


def make_scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Creates the recipe's learning rate schedule with timm. Returns None if the learning rate never changes.

    Args:
        steps: number of steps in an epoch.
    """
    scaled = any("lr_scale" in group for group in optimizer.param_groups)
    warmup = warmup_epochs(recipe, steps)
    if recipe.schedule == "constant" and not warmup and not scaled:
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
        warmup_epochs=warmup,  # type: ignore[arg-type]
        step_on_epochs=by_epoch,
        updates_per_epoch=steps,
    )
    if recipe.schedule == "multistep" and not by_epoch:
        scheduler.decay_t = [milestone * steps + 1 for milestone in recipe.milestones]  # not one step earlier
    if recipe.warmup_schedule == "constant":
        scheduler.warmup_steps = [0.0] * len(scheduler.base_values)  # what timm adds to warmup_lr in each step
    return scheduler


def warmup_epochs(recipe: Recipe, steps: int) -> float:
    """Returns the warm-up in epochs of ``steps`` steps. It is shortened to a fifth of a run that is not longer."""
    if not recipe.warmup_steps:
        return recipe.shortened_warmup
    given = recipe.warmup_steps / steps
    return given if given < recipe.epochs else recipe.epochs / 5
