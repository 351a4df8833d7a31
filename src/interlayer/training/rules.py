"""Rules that the values of a recipe must satisfy, each with the message if it does not."""

from __future__ import annotations

import re
from typing import Any


def _is_probability(name: str) -> tuple[Any, str]:
    return (lambda r: 0 <= getattr(r, name) <= 1), f"{name} must be from 0 to 1, got {{{name}}}"


def _is_at_least(name: str, least: float) -> tuple[Any, str]:
    return (
        lambda r: getattr(r, name) is None or getattr(r, name) >= least,
        f"{name} must be at least {least}, got {{{name}}}",
    )


def _is_range(name: str) -> tuple[Any, str]:
    return (
        lambda r: len(getattr(r, name)) == 2 and 0 < getattr(r, name)[0] <= getattr(r, name)[1],
        f"{name} must be two rising positive numbers, got {{{name}}}",
    )


_RAND_OPTION = r"(m\d+(\.\d+)?|mstd(inf|\d+(\.\d+)?)|mmax\d+|n\d+|p[01]?\.?\d*|w\d+|inc[01]|t\d+)"
AUTO_AUGMENT = rf"rand(-{_RAND_OPTION})*|(original|originalr|v0|v0r|3a)(-mstd\d+(\.\d+)?)?|augmix(-\w+(\.\d+)?)*"
RULES: list[tuple[Any, str]] = [
    *map(
        _is_probability,
        ("flip", "erasing", "mix_probability", "mix_switch", "drop_rate", "drop_path_rate"),
    ),
    *(
        _is_at_least(name, 1)
        for name in ("epochs", "batch_size", "accumulate", "repeated_augmentation", "image_size", "num_classes")
    ),
    *(
        _is_at_least(name, 0)
        for name in ("lr", "weight_decay", "workers", "padding", "mixup", "cutmix", "validation", "warmup_epochs")
    ),
    *(_is_at_least(name, 0) for name in ("min_lr", "warmup_lr", "color_jitter", "checkpoint_steps", "seed")),
    _is_probability("vertical_flip"),
    _is_at_least("eval_batch_size", 1),
    *(_is_at_least(name, 1) for name in ("epoch_steps", "eval_every", "longer_side", "eval_shorter_side")),
    *(_is_at_least(name, 0) for name in ("warmup_steps", "freeze_stages")),
    _is_at_least("lr_batch_size", 1),
    *map(_is_range, ("crop_scale", "crop_ratio", "shorter_side", "scale_jitter")),
    (lambda r: 0 <= r.label_smoothing < 1, "label_smoothing must be from 0 to below 1, got {label_smoothing}"),
    (lambda r: 0 <= r.ema < 1, "ema must be from 0 to below 1, got {ema}"),
    (lambda r: 0 <= r.momentum < 1, "momentum must be from 0 to below 1, got {momentum}"),
    (lambda r: 0 < r.decay_rate <= 1, "decay_rate must be above 0 and at most 1, got {decay_rate}"),
    (lambda r: r.crop_pct is None or 0 < r.crop_pct <= 1, "crop_pct must be above 0 and at most 1, got {crop_pct}"),
    (lambda r: r.mean is None or len(r.mean) == 3, "mean must be three numbers, got {mean}"),
    (lambda r: r.std is None or (len(r.std) == 3 and min(r.std) > 0), "std must be three positive numbers, got {std}"),
    (
        lambda r: not r.warmup_steps or (r.schedule_on == "step" and not r.warmup_epochs),
        "warmup_steps={warmup_steps} needs schedule_on=step and warmup_epochs=0, got schedule_on={schedule_on} and "
        "warmup_epochs={warmup_epochs:g}",
    ),
    (lambda r: not r.model.endswith("+"), "model={model} names no mechanism after the +"),
    (lambda r: r.decay_epochs > 0, "decay_epochs must be above 0, got {decay_epochs}"),
    (lambda r: r.clip_grad is None or r.clip_grad > 0, "clip_grad must be above 0, got {clip_grad}"),
    (
        lambda r: r.batch_size % r.accumulate == 0,
        "batch_size={batch_size} cannot be cut into accumulate={accumulate} equal parts",
    ),
    (
        lambda r: r.schedule != "multistep" or bool(r.milestones),
        "schedule: multistep needs milestones, for example milestones=[150,225]",
    ),
    (
        lambda r: r.auto_augment is None or re.fullmatch(AUTO_AUGMENT, r.auto_augment) is not None,
        "auto_augment={auto_augment} is not known to timm: rand-m9-mstd0.5-inc1 (RandAugment), original, originalr, "
        "v0, v0r (AutoAugment), 3a or augmix",
    ),
    (lambda r: r.new_lr_scale > 0, "new_lr_scale must be above 0, got {new_lr_scale}"),
    (
        lambda r: r.mechanism_lr_scale is None or r.mechanism_lr_scale > 0,
        "mechanism_lr_scale must be above 0, got {mechanism_lr_scale}",
    ),
    (
        lambda r: r.layer_decay is None or 0 < r.layer_decay <= 1,
        "layer_decay must be above 0 and at most 1, got {layer_decay}",
    ),
    _is_at_least("freeze_epochs", 0),
    (
        lambda r: not (r.freeze_backbone and r.freeze_epochs),
        "freeze_backbone=true freezes for the whole run, freeze_epochs={freeze_epochs} for the first epochs: set one",
    ),
    (
        lambda r: r.sharding == "none" or not (r.freeze_backbone or r.freeze_epochs),
        "freeze_backbone and freeze_epochs do not work with sharding=fsdp; set sharding=none",
    ),
    (lambda r: r.sharding == "none" or r.ema == 0, "ema={ema} does not work with sharding=fsdp; set one of them off"),
]
