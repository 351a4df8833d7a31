"""Recipes: all options of a training run in one flat, typed dataclass, read from YAML.

A recipe file lists the values it changes. `extends: NAME` starts from another recipe instead of the defaults below.
`key=value` overrides take precedence over the file. Values are checked against the types of the fields, and an unknown
key raises an error that suggests the nearest valid one, so that a misspelled option is never ignored silently.
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
FINE_TUNING = ("new_lr_scale", "layer_decay", "freeze_epochs", "freeze_backbone")


class RecipeError(TrainingError):
    """Raised if a recipe cannot be run."""


@dataclass(frozen=True)
class Recipe:
    """The options of a training run. The defaults train with random crops and flips, SGD and a cosine schedule."""

    # The task, by name.
    task: str = "classification"

    # The network: a timm model name, or NAME+MECHANISM to attach a mechanism. Several mechanisms and their options are
    # written as NAME+cb:scaled=true+mrla_light.
    model: str = ""
    model_options: Options = field(default_factory=dict)  # passed to timm.create_model
    attach_options: Options = field(default_factory=dict)  # passed to interlayer.attach, for NAME+MECHANISM
    pretrained: bool = False  # load the pretrained weights of the backbone; weights takes precedence
    weights: str | None = None  # a weights file to start from; a head with another number of classes is not loaded
    zero_head: bool = False  # initialize the classifier with zeros
    drop_rate: float = 0.0  # dropout rate before the classifier
    drop_path_rate: float = 0.0  # stochastic depth rate
    batch_norm_momentum: float | None = None  # PyTorch's convention: the weight of the new batch

    # Data.
    data: str = "digits"
    data_options: Options = field(default_factory=dict)  # passed to the reader: splits, keys
    image_size: int | None = None  # the model's default if null
    num_classes: int | None = None  # the number of classes of the data if null
    validation: float = 0.0  # held out of the training images: a number of images, or a fraction if below 1
    on_bad_image: Literal["fail", "skip"] = "fail"
    resident: Literal["auto", "yes", "no"] = "auto"  # keep the images on the device and augment them there
    workers: int = 4  # number of processes that load images that are not resident
    mean: list[float] | None = None  # the model's default if null, as std
    std: list[float] | None = None
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"] = "bicubic"
    crop_pct: float | None = None  # center crop of evaluation; the model's default if null

    # Augmentation, applied to training images.
    crop: Literal["resized", "padded", "none"] = "resized"  # random resized crop; pad and crop; resize only
    crop_scale: list[float] = field(default_factory=lambda: [0.08, 1.0])
    crop_ratio: list[float] = field(default_factory=lambda: [3 / 4, 4 / 3])
    padding: int = 4  # pixels on each side, for crop=padded
    flip: float = 0.5  # probability
    color_jitter: float = 0.0
    auto_augment: str | None = None  # in timm's notation: rand-m9-mstd0.5-inc1, original, v0
    erasing: float = 0.0  # probability of random erasing
    erasing_mode: Literal["pixel", "const"] = "pixel"
    mixup: float = 0.0  # alpha of Mixup's Beta distribution; 0 disables Mixup
    cutmix: float = 0.0  # alpha of CutMix's Beta distribution; 0 disables CutMix
    mix_probability: float = 1.0  # probability of mixing a batch
    mix_switch: float = 0.5  # probability of CutMix if both are enabled
    repeated_augmentation: int = 1  # number of views of an image in one batch
    label_smoothing: float = 0.0

    # Optimization.
    epochs: int = 100
    batch_size: int = 256  # images per update, over all ranks and accumulated splits
    accumulate: int = 1  # number of splits of a rank's batch, over which gradients are accumulated
    optimizer: str = "sgd"  # timm's name: sgd uses Nesterov momentum, momentum does not
    lr: float = 0.1
    lr_batch_size: int | None = None  # if given, lr is for this batch size and is scaled linearly to batch_size
    new_lr_scale: float = 1.0  # learning rate of parameters that did not come from trained weights, relative to lr
    layer_decay: float | None = None  # of the learning rate of loaded parameters, from each layer to the one before
    freeze_epochs: float = 0.0  # train only new parameters for the first epochs
    freeze_backbone: bool = False  # train only new parameters for the whole run
    momentum: float = 0.9
    weight_decay: float = 1e-4
    decay_norms_and_biases: bool = True
    optimizer_options: Options = field(default_factory=dict)  # betas, eps, alpha
    schedule: Literal["cosine", "step", "multistep", "constant"] = "cosine"
    schedule_on: Literal["epoch", "step"] = "epoch"  # when the learning rate changes
    warmup_epochs: float = 0.0
    warmup_lr: float = 0.0
    min_lr: float = 0.0  # the minimum of the cosine schedule
    decay_epochs: float = 30.0  # for schedule=step
    decay_rate: float = 0.1  # for schedule=step and multistep
    milestones: list[int] = field(default_factory=list)  # epochs, for schedule=multistep
    clip_grad: float | None = None  # maximum norm of the gradient
    ema: float = 0.0  # decay of the moving average of the weights, which is then evaluated; 0 disables it

    # The machine, and what is written.
    seed: int = 0
    device: str | None = None  # cpu or cuda; cuda if available
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = "float32"
    deterministic: bool = False  # use only deterministic kernels on a GPU, which are slower
    channels_last: bool = False
    compile: Literal["no", "default", "tuned"] = "no"  # tuned: slower to compile, faster to run
    cuda_graph: Literal["auto", "yes", "no"] = "auto"  # replay the step as one graph; needs a GPU and resident images
    sharding: Literal["none", "fsdp"] = "none"  # whether each rank holds a copy of the model or a shard of it
    sync_batchnorm: bool = False  # compute batch norm statistics over all GPUs
    eval_batch_size: int | None = None  # images per rank; chosen from batch_size and the image size if null
    checkpoint_steps: int = 0  # also save every N steps; 0: only at the end of an epoch and when stopped
    tensorboard: bool = True
    wandb: str | None = None  # name of a Weights & Biases project

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
        """The learning rate, scaled to the batch size."""
        return self.lr * (self.batch_size / self.lr_batch_size if self.lr_batch_size else 1.0)

    @property
    def scaled_min_lr(self) -> float:
        """The minimum learning rate, scaled to the batch size."""
        return self.min_lr * (self.batch_size / self.lr_batch_size if self.lr_batch_size else 1.0)

    @property
    def shortened_warmup(self) -> float:
        """The warm-up in epochs. A warm-up that would not end before the run is shortened to a fifth of the run.

        If the learning rate changes only between epochs, the fifth is rounded down to whole epochs.
        """
        if self.warmup_epochs < self.epochs:
            return self.warmup_epochs
        return self.epochs / 5 if self.schedule_on == "step" else float(self.epochs // 5)

    @property
    def fine_tuning_keys(self) -> dict[str, Any]:
        """The values that distinguish new parameters from loaded ones, if they differ from their defaults."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name in FINE_TUNING and getattr(self, f.name) != f.default
        }

    @property
    def mixes(self) -> bool:
        """Whether batches are mixed by Mixup or CutMix, so that targets are soft."""
        return (self.mixup > 0 or self.cutmix > 0) and self.mix_probability > 0

    def replace(self, **changes: Any) -> Recipe:
        """Returns a copy with some values changed. The new values are checked."""
        return from_values({**dataclasses.asdict(self), **changes})

    def to_yaml(self, header: str = "") -> str:
        """Returns all values as YAML, with ``header`` as a comment at the top."""
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


_RAND_OPTION = r"(m\d+(\.\d+)?|mstd(inf|\d+(\.\d+)?)|mmax\d+|n\d+|p[01]?\.?\d*|w\d+|inc[01]|t\d+)"
AUTO_AUGMENT = rf"rand(-{_RAND_OPTION})*|(original|originalr|v0|v0r|3a)(-mstd\d+(\.\d+)?)?|augmix(-\w+(\.\d+)?)*"
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
    (lambda r: r.new_lr_scale > 0, "new_lr_scale must be above 0, got {new_lr_scale}"),
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

_TYPES = typing.get_type_hints(Recipe)
_NAMES = [f.name for f in dataclasses.fields(Recipe)]


def list_recipes() -> list[str]:
    """Returns the names of the recipes that come with the package."""
    files = resources.files("interlayer").joinpath("recipes").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """Returns the text of a recipe, given the name of one in the package or the path of a file."""
    if name in list_recipes():
        return resources.files("interlayer").joinpath("recipes", f"{name}.yaml").read_text()
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise RecipeError(f"{path}: no such recipe file")
        return path.read_text()
    raise RecipeError(f"unknown recipe {name!r}{_nearest(name, list_recipes())}; `interlayer recipes` lists them")


def load_recipe(name: str, overrides: Sequence[str] = (), **values: Any) -> Recipe:
    """Loads a recipe by name or path. ``key=value`` strings and keyword arguments override its values.

    >>> load_recipe("rla_cifar", ["epochs=10"], model="preresnet20_cifar").epochs
    10
    """
    merged = _values_of(name, seen=())
    if values.get("model") and "+" not in values["model"]:
        merged.pop("attach_options", None)  # they are for the recipe's own network
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise RecipeError(f"expected key=value, got {override!r}")
        _set(merged, key.strip(), parse_value(text))
    merged.update({key: value for key, value in values.items() if value is not None})
    return from_values(merged)


def read_recipe(path: Path) -> Recipe:
    """Reads a resolved recipe from the folder of a run."""
    return from_values(_mapping(path.read_text(), str(path)))


def from_values(values: Mapping[str, Any]) -> Recipe:
    """Creates a recipe from values, which are checked and converted to the types of the fields."""
    for key in values:
        if key not in _NAMES:
            raise RecipeError(f"unknown key {key!r} in the recipe{_nearest(key, _NAMES)}")
    return Recipe(**{key: _coerce(key, value, _TYPES[key]) for key, value in values.items()})


def differences(ours: Recipe, theirs: Recipe) -> dict[str, tuple[Any, Any]]:
    """Returns the values that differ between two recipes, by key."""
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
    """Sets a value. A dotted key such as optimizer_options.eps sets one entry of a dictionary."""
    first, *rest = key.split(".")
    if not rest:
        values[key] = value
        return
    if first not in _NAMES:
        raise RecipeError(f"unknown key {first!r} in the recipe{_nearest(first, _NAMES)}")
    if typing.get_origin(_TYPES[first]) is not dict:
        raise RecipeError(f"{first} holds one value, not options: write {first}=...")
    inner = values[first] = dict(values.get(first) or {})
    for name in rest[:-1]:
        inner[name] = dict(inner.get(name) or {})
        inner = inner[name]
    inner[rest[-1]] = _number(value)


def _number(value: Any) -> Any:
    """Converts text such as 1e-3 to a number, because YAML 1.1 reads it as text."""
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
