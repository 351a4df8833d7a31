"""Recipes: all values of a training run in one flat, typed record, read from YAML and overridable by name.

A recipe file names the values it changes; `extends: NAME` starts from another recipe instead of the defaults below.
`key=value` overrides win over the file. Values are checked against the types here, and an unknown key is refused with
the nearest valid one, so that a misspelt option never trains silently.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from ..models.build import parse_value
from ..tasks import TaskError, task_class
from .files import TrainingError

Options = dict[str, Any]


class RecipeError(TrainingError):
    """A recipe that cannot be run as it is written."""


@dataclass(frozen=True)
class Recipe:
    """One training setting. The defaults train any network with crops and flips, SGD and a cosine schedule."""

    # What is learned: a task by name.
    task: str = "classification"

    # The network: a name timm knows, or NAME+MECHANISM for a backbone with a mechanism attached; several of them, with
    # options, as NAME+cb:scaled=true+mrla_light.
    model: str = ""
    model_options: Options = field(default_factory=dict)  # of timm.create_model
    attach_options: Options = field(default_factory=dict)  # of interlayer.attach, for NAME+MECHANISM
    pretrained: bool = False  # the backbone's pretrained weights
    weights: str | None = None  # a file of weights to start from; a head of another number of classes is left out
    zero_head: bool = False  # start the classifier at zero
    drop_rate: float = 0.0  # dropout before the classifier
    drop_path_rate: float = 0.0  # stochastic depth
    batch_norm_momentum: float | None = None  # PyTorch's: the weight of the new batch

    # Data.
    data: str = "digits"
    data_options: Options = field(default_factory=dict)  # of the reader: splits, keys
    image_size: int | None = None  # the model's own where not given
    num_classes: int | None = None  # the data's own where not given
    validation: float = 0.0  # held out of the training images: a number of images, or a fraction below 1
    on_bad_image: Literal["fail", "skip"] = "fail"
    resident: Literal["auto", "yes", "no"] = "auto"  # images kept on the device and augmented there
    workers: int = 4  # processes that load images where they are not resident
    mean: list[float] | None = None  # the model's own where not given
    std: list[float] | None = None
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"] = "bicubic"
    crop_pct: float | None = None  # of evaluation's central crop; the model's own where not given

    # Augmentation, applied to training images.
    crop: Literal["resized", "padded", "none"] = "resized"  # random resized crop; pad and crop; only resize
    crop_scale: list[float] = field(default_factory=lambda: [0.08, 1.0])
    crop_ratio: list[float] = field(default_factory=lambda: [3 / 4, 4 / 3])
    padding: int = 4  # pixels on each side, for crop: padded
    flip: float = 0.5  # probability
    color_jitter: float = 0.0
    auto_augment: str | None = None  # timm's notation: rand-m9-mstd0.5-inc1, original, v0
    erasing: float = 0.0  # probability of random erasing
    erasing_mode: Literal["pixel", "const"] = "pixel"
    mixup: float = 0.0  # alpha of Mixup's Beta distribution; 0 for none
    cutmix: float = 0.0  # alpha of CutMix's Beta distribution; 0 for none
    mix_probability: float = 1.0  # of mixing a batch at all
    mix_switch: float = 0.5  # probability of CutMix where both are on
    repeated_augmentation: int = 1  # views of an image in one batch
    label_smoothing: float = 0.0

    # Optimization.
    epochs: int = 100
    batch_size: int = 256  # of one update, over all ranks and accumulated splits
    accumulate: int = 1  # splits of the images that a rank takes of a batch, whose gradients are accumulated
    optimizer: str = "sgd"  # timm's name; its sgd is Nesterov's, its momentum the plain one
    lr: float = 0.1
    lr_batch_size: int | None = None  # where given, lr is meant for this batch size and scaled linearly to batch_size
    momentum: float = 0.9
    weight_decay: float = 1e-4
    decay_norms_and_biases: bool = True
    optimizer_options: Options = field(default_factory=dict)  # betas, eps, alpha
    schedule: Literal["cosine", "step", "multistep", "constant"] = "cosine"
    schedule_on: Literal["epoch", "step"] = "epoch"  # when the learning rate changes
    warmup_epochs: float = 0.0
    warmup_lr: float = 0.0
    min_lr: float = 0.0  # the floor of the cosine
    decay_epochs: float = 30.0  # for schedule: step
    decay_rate: float = 0.1  # for schedule: step and multistep
    milestones: list[int] = field(default_factory=list)  # epochs, for schedule: multistep
    clip_grad: float | None = None  # largest norm of the gradient
    ema: float = 0.0  # decay of the moving average of the weights, which is then evaluated; 0 for none

    # The machine, and what is written.
    seed: int = 0
    device: str | None = None  # cpu or cuda; cuda where there is one
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = "float32"
    deterministic: bool = False  # on a GPU: only kernels that give the same bits every time, slower
    channels_last: bool = False
    compile: Literal["no", "default", "tuned"] = "no"  # tuned: slower to compile, faster to run
    cuda_graph: Literal["auto", "yes", "no"] = "auto"  # replay the step as one graph: GPU, resident images
    sharding: Literal["none", "fsdp"] = "none"  # how several ranks hold the model: each a copy, or each a shard
    sync_batchnorm: bool = False  # batch norms over all GPUs
    eval_batch_size: int | None = None  # images of a rank; those of a training step, or more of small images
    checkpoint_steps: int = 0  # checkpoint every so many steps too; 0: at the end of an epoch, and when stopped
    tensorboard: bool = True
    wandb: str | None = None  # a Weights & Biases project

    def __post_init__(self) -> None:
        try:
            task_class(self.task)
        except TaskError as error:
            raise RecipeError(str(error)) from error
        for check, message in _RULES:
            if not check(self):
                raise RecipeError(message.format(**dataclasses.asdict(self)))

    @property
    def scaled_lr(self) -> float:
        """The learning rate at this batch size."""
        return self.lr * (self.batch_size / self.lr_batch_size if self.lr_batch_size else 1.0)

    @property
    def scaled_min_lr(self) -> float:
        """The floor of the learning rate at this batch size."""
        return self.min_lr * (self.batch_size / self.lr_batch_size if self.lr_batch_size else 1.0)

    @property
    def mixes(self) -> bool:
        """Whether batches are mixed, so that targets are distributions."""
        return (self.mixup > 0 or self.cutmix > 0) and self.mix_probability > 0

    def replace(self, **changes: Any) -> Recipe:
        """Returns this recipe with some values changed, checked like any other."""
        return from_values({**dataclasses.asdict(self), **changes})

    def to_yaml(self, header: str = "") -> str:
        """Returns all values as YAML, under ``header`` as a comment."""
        comment = "".join(f"# {line}\n" for line in header.splitlines())
        return comment + yaml.safe_dump(dataclasses.asdict(self), sort_keys=False, default_flow_style=None)


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


_RAND_PART = r"(m\d+(\.\d+)?|mstd(inf|\d+(\.\d+)?)|mmax\d+|n\d+|p[01]?\.?\d*|w\d+|inc[01]|t\d+)"
AUTO_AUGMENT = rf"rand(-{_RAND_PART})*|(original|originalr|v0|v0r|3a)(-mstd\d+(\.\d+)?)?|augmix(-\w+(\.\d+)?)*"
_RULES: list[tuple[Any, str]] = [
    *map(_is_probability, ("flip", "erasing", "mix_probability", "mix_switch", "drop_rate", "drop_path_rate")),
    *(
        _is_at_least(name, 1)
        for name in ("epochs", "batch_size", "accumulate", "repeated_augmentation", "image_size", "num_classes")
    ),
    *(
        _is_at_least(name, 0)
        for name in ("lr", "weight_decay", "workers", "padding", "mixup", "cutmix", "validation", "warmup_epochs")
    ),
    *(_is_at_least(name, 0) for name in ("min_lr", "warmup_lr", "color_jitter", "checkpoint_steps", "seed")),
    _is_at_least("eval_batch_size", 1),
    _is_at_least("lr_batch_size", 1),
    *map(_is_range, ("crop_scale", "crop_ratio")),
    (lambda r: 0 <= r.label_smoothing < 1, "label_smoothing must be from 0 to below 1, got {label_smoothing}"),
    (lambda r: 0 <= r.ema < 1, "ema must be from 0 to below 1, got {ema}"),
    (lambda r: 0 <= r.momentum < 1, "momentum must be from 0 to below 1, got {momentum}"),
    (lambda r: 0 < r.decay_rate <= 1, "decay_rate must be above 0 and at most 1, got {decay_rate}"),
    (lambda r: r.crop_pct is None or 0 < r.crop_pct <= 1, "crop_pct must be above 0 and at most 1, got {crop_pct}"),
    (lambda r: r.mean is None or len(r.mean) == 3, "mean must be three numbers, got {mean}"),
    (lambda r: r.std is None or (len(r.std) == 3 and min(r.std) > 0), "std must be three positive numbers, got {std}"),
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
    (lambda r: r.sharding == "none" or r.ema == 0, "ema={ema} does not work with sharding=fsdp; set one of them off"),
]

_TYPES = typing.get_type_hints(Recipe)
_NAMES = [f.name for f in dataclasses.fields(Recipe)]


def list_recipes() -> list[str]:
    """Returns the names of the recipes that come with the package."""
    files = resources.files("interlayer").joinpath("recipes").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """Returns the text of a recipe: one of the package by name, or a file by path."""
    if name in list_recipes():
        return resources.files("interlayer").joinpath("recipes", f"{name}.yaml").read_text()
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise RecipeError(f"{path}: no such recipe file")
        return path.read_text()
    raise RecipeError(f"unknown recipe {name!r}{_nearest(name, list_recipes())}; `interlayer recipes` lists them")


def load_recipe(name: str, overrides: Sequence[str] = (), **values: Any) -> Recipe:
    """Loads a recipe by name or path, with ``key=value`` strings and keyword values on top.

    >>> load_recipe("rla_cifar", ["epochs=10"], model="preresnet20_cifar").epochs
    10
    """
    merged = _values_of(name, seen=())
    if values.get("model") and "+" not in values["model"]:
        merged.pop("attach_options", None)  # those of the recipe's own network
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise RecipeError(f"expected key=value, got {override!r}")
        _set(merged, key.strip(), parse_value(text))
    merged.update({key: value for key, value in values.items() if value is not None})
    return from_values(merged)


def read_recipe(path: Path) -> Recipe:
    """Reads a resolved recipe, as a run keeps it."""
    return from_values(_mapping(path.read_text(), str(path)))


def from_values(values: Mapping[str, Any]) -> Recipe:
    """Makes a recipe of these values, each checked and converted to its type."""
    for key in values:
        if key not in _NAMES:
            raise RecipeError(f"unknown key {key!r} in the recipe{_nearest(key, _NAMES)}")
    return Recipe(**{key: _coerce(key, value, _TYPES[key]) for key, value in values.items()})


def differences(ours: Recipe, theirs: Recipe) -> dict[str, tuple[Any, Any]]:
    """Returns the values in which two recipes differ, by key."""
    a, b = dataclasses.asdict(ours), dataclasses.asdict(theirs)
    return {key: (a[key], b[key]) for key in a if a[key] != b[key]}


def _values_of(name: str, seen: tuple[str, ...]) -> dict[str, Any]:
    if name in seen:
        raise RecipeError(f"recipe {name!r} extends itself: {' -> '.join((*seen, name))}")
    values = _mapping(recipe_text(name), name)
    base = values.pop("extends", None)
    return {**(_values_of(str(base), (*seen, name)) if base else {}), **values}


def _mapping(text: str, name: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"recipe {name} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"recipe {name} must be a list of key: value lines")
    return values


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    """`key` may be dotted for the entries of an options field: optimizer_options.eps."""
    first, *rest = key.split(".")
    if not rest:
        values[key] = value
        return
    if first not in _NAMES:
        raise RecipeError(f"unknown key {first!r} in the recipe{_nearest(first, _NAMES)}")
    if typing.get_origin(_TYPES[first]) is not dict:
        raise RecipeError(f"{first} holds one value, not options: write {first}=...")
    inner = values[first] = dict(values.get(first) or {})
    for part in rest[:-1]:
        inner[part] = dict(inner.get(part) or {})
        inner = inner[part]
    inner[rest[-1]] = _number(value)


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 as text; people mean a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    if isinstance(value, list):
        return [_number(item) for item in value]
    return value


def _coerce(key: str, value: Any, kind: Any) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _coerce(key, value, next(arg for arg in typing.get_args(kind) if arg is not type(None)))
    if origin is Literal:
        choices = typing.get_args(kind)
        if isinstance(value, bool):  # YAML reads yes and no as booleans
            value = ("yes" if "yes" in choices else "default") if value else ("no" if "no" in choices else "none")
        if value not in choices:
            raise RecipeError(
                f"{key} must be one of {', '.join(choices)}, got {value!r}{_nearest(str(value), choices)}"
            )
        return value
    if origin is list:
        (item,) = typing.get_args(kind)
        if not isinstance(value, (list, tuple)):
            raise RecipeError(f"{key} must be a list such as [1, 2], got {value!r}")
        return [_coerce(key, entry, item) for entry in value]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise RecipeError(f"{key} must be options such as {{name: value}}, got {value!r}")
        return {str(name): _number(entry) for name, entry in value.items()}
    return _coerce_scalar(key, value, kind)


def _coerce_scalar(key: str, value: Any, kind: type) -> Any:
    value = _number(value) if kind in (int, float) else value
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


def _nearest(name: str, valid: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
