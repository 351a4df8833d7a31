"""Keys of recipes: their meaning, the conversion of their values, and messages about keys that do not exist."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .files import TrainingError

SYNONYMS = {  # keys of other programs
    "learning_rate": "lr", "base_lr": "lr", "head_lr": "new_lr_scale", "lr_scale": "new_lr_scale",
    "llrd": "layer_decay", "layer_lr_decay": "layer_decay", "freeze": "freeze_backbone",
    "wd": "weight_decay", "bs": "batch_size", "batch": "batch_size", "batchsize": "batch_size",
    "img_size": "image_size", "imgsz": "image_size", "input_size": "image_size", "resolution": "image_size",
    "num_epochs": "epochs", "max_epochs": "epochs", "n_epochs": "epochs", "amp": "precision", "dtype": "precision",
    "opt": "optimizer", "optim": "optimizer", "sched": "schedule", "scheduler": "schedule", "lr_scheduler": "schedule",
    "warmup": "warmup_epochs", "dropout": "drop_rate", "drop": "drop_rate", "drop_path": "drop_path_rate",
    "smoothing": "label_smoothing", "num_workers": "workers", "reprob": "erasing", "random_erasing": "erasing",
    "aa": "auto_augment", "hflip": "flip", "model_ema": "ema", "ema_decay": "ema", "grad_clip": "clip_grad",
    "gradient_clip": "clip_grad", "grad_accum_steps": "accumulate", "gradient_accumulation_steps": "accumulate",
    "checkpoint": "weights", "initial_checkpoint": "weights", "classes": "num_classes", "val_split": "validation",
    "torchcompile": "compile", "scale": "crop_scale", "arch": "model", "network": "model", "dataset": "data",
}  # fmt: skip
LISTED = "`interlayer recipes --keys` lists all keys"


class RecipeError(TrainingError):
    """Raised if a recipe cannot be run."""


def key_field(default: Any, meaning: str) -> Any:
    """Creates a field of the recipe.

    Args:
        default: the default value.
        meaning: a description in one line, for the command line and the documentation.
    """
    metadata = {"meaning": meaning}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class KeyDescription:
    """One key of recipes, for help and documentation."""

    name: str
    type: str
    default: str
    meaning: str


def describe_keys(recipe: type) -> dict[str, KeyDescription]:
    """Returns the keys of the dataclass of recipes by name, in order."""
    kinds, defaults = typing.get_type_hints(recipe), recipe()
    return {
        field.name: KeyDescription(
            field.name, _shown_type(kinds[field.name]), shown_value(getattr(defaults, field.name)),
            field.metadata["meaning"],
        )
        for field in dataclasses.fields(recipe)
    }  # fmt: skip


def shown_value(value: Any) -> str:
    """Returns a value as it is written in a recipe."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(shown_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {shown_value(entry)}" for name, entry in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else (str(value) or '""')


def _shown_type(kind: Any) -> str:
    arguments = typing.get_args(kind)
    if type(None) in arguments:
        return f"{_shown_type(next(arg for arg in arguments if arg is not type(None)))}, or null"
    if typing.get_origin(kind) is Literal:
        return ", ".join(arguments[:-1]) + f" or {arguments[-1]}"
    if typing.get_origin(kind) is list:
        return "list of " + {int: "whole numbers", float: "numbers"}[arguments[0]]
    return {bool: "true or false", int: "whole number", float: "number", str: "text"}.get(kind, "options by name")


def unknown_key(name: str, valid: Sequence[str]) -> RecipeError:
    """Returns the error of a key that recipes do not have."""
    return RecipeError(f"unknown key {name!r} in the recipe{nearest(name, valid) or ';'} {LISTED}")


def nearest(name: str, valid: Sequence[str]) -> str:
    """Returns a question that names the valid name nearest to a misspelled one, or nothing if none is near."""
    synonym = SYNONYMS.get(name.lower().replace("-", "_"))
    near = [synonym] if synonym in valid else difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def as_number(value: Any) -> Any:
    """Converts text such as 1e-3 to a number, because YAML 1.1 reads it as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    if isinstance(value, list):
        return [as_number(item) for item in value]
    return value


def coerce(key: str, value: Any, kind: Any) -> Any:
    """Converts a value to the type of its key. Raises a `RecipeError` if it does not fit."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return coerce(key, value, next(arg for arg in typing.get_args(kind) if arg is not type(None)))
    if origin is Literal:
        choices = typing.get_args(kind)
        if isinstance(value, bool):  # YAML reads yes and no as booleans
            value = ("yes" if "yes" in choices else "default") if value else ("no" if "no" in choices else "none")
        if value not in choices:
            raise RecipeError(f"{key} must be one of {', '.join(choices)}, got {value!r}{nearest(str(value), choices)}")
        return value
    if origin is list:
        (item,) = typing.get_args(kind)
        if not isinstance(value, (list, tuple)):
            raise RecipeError(f"{key} must be a list such as [1, 2], got {value!r}")
        return [coerce(key, entry, item) for entry in value]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise RecipeError(f"{key} must be options such as {{name: value}}, got {value!r}")
        return {str(name): as_number(entry) for name, entry in value.items()}
    return _coerce_scalar(key, value, kind)


def _coerce_scalar(key: str, value: Any, kind: type) -> Any:
    value = as_number(value) if kind in (int, float) else value
    if isinstance(value, float) and not math.isfinite(value):
        raise RecipeError(f"{key} must be a finite number, got {value}")
    fits = {
        bool: isinstance(value, bool),
        int: not isinstance(value, bool) and isinstance(value, (int, float)) and value == int(value),
        float: isinstance(value, (int, float)) and not isinstance(value, bool),
        str: isinstance(value, (str, int, float)) and not isinstance(value, bool),
    }[kind]
    if not fits:
        wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
        raise RecipeError(f"{key} must be {wanted}, got {value!r}")
    return kind(value)
