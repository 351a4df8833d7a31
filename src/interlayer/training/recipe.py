"""Recipes: all options of a training run in one flat, typed dataclass, read from YAML.

A recipe file lists the values it changes. `extends: NAME` starts from another recipe instead of the defaults below.
`key=value` overrides take precedence over the file. Values are checked against the types of the fields, and an unknown
key raises an error that suggests the nearest valid one, so that a misspelled option is never ignored silently.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from ..models.build import parse_value
from ..tasks import TaskError, task_class
from .keys import KeyDescription, RecipeError, as_number, coerce, describe_keys, key_field, nearest, unknown_key
from .rules import RULES

Options = dict[str, Any]
SECTIONS = {  # the first key of each section of the dataclass, for the documentation
    "task": "The network",
    "data": "Data",
    "crop": "Augmentation of training images",
    "epochs": "Optimization",
    "new_lr_scale": "Fine-tuning",
    "seed": "The machine, and what is written",
}
FINE_TUNING = ("new_lr_scale", "mechanism_lr_scale", "layer_decay", "freeze_epochs", "freeze_backbone")


@dataclass(frozen=True)
class Recipe:
    """The options of a training run. The defaults train with random crops and flips, SGD and a cosine schedule.

    The meaning of every key is part of its field: `interlayer recipes KEY` shows it, and docs/recipes.md lists all.
    """

    # The network.
    task: str = key_field("classification", "the task, by name")
    model: str = key_field(
        "", "timm's name of the network, or NAME+MECHANISM to attach a mechanism, as in NAME+cb:scaled=true+mrla_light"
    )
    model_options: Options = key_field({}, "further options of timm.create_model")
    attach_options: Options = key_field(
        {}, "options of the mechanism, for NAME+MECHANISM; see `interlayer mechanisms NAME`"
    )
    pretrained: bool = key_field(
        False, "start from timm's pretrained weights of the backbone; ignored if weights is given"
    )
    weights: str | None = key_field(
        None, "a weights file to start from; mechanisms may be missing, the classifier may have other classes"
    )
    zero_head: bool = key_field(
        False, "initialize the classifier with zeros, so that it is new even if weights have it"
    )
    drop_rate: float = key_field(0.0, "dropout rate before the classifier")
    drop_path_rate: float = key_field(0.0, "stochastic depth rate of the backbone and of mechanisms that support it")
    batch_norm_momentum: float | None = key_field(
        None, "momentum of batch norms in PyTorch's convention, the weight of the new batch; the model's own if null"
    )
    detector: str | None = key_field(
        None, "faster_rcnn or retinanet for task=detect, mask_rcnn for task=instances; the first one if null"
    )
    segmenter: str = key_field("upernet", "upernet or fpn, for task=segment")
    head_options: Options = key_field(
        {}, "options of interlayer.detector or interlayer.segmenter and of torchvision's detector, and anchor_sizes"
    )
    freeze_stages: int = key_field(0, "frozen stages of the backbone, from the stem, under a detector or segmenter")
    frozen_norms: Literal["none", "statistics", "all"] = key_field(
        "none", "batch norms of the backbone under a detector or segmenter: keep their statistics, or also weights"
    )

    # Data.
    data: str = key_field(
        "digits",
        "a folder of images, boxes or masks, or of CIFAR, digits, synthetic, hfds/NAME, wds/FOLDER or tfds/NAME",
    )
    data_options: Options = key_field({}, "options of the reader, such as train_split and the keys of a dataset")
    image_size: int | None = key_field(None, "height and width of the images in pixels; the model's default if null")
    num_classes: int | None = key_field(None, "number of classes; that of the data if null")
    validation: float = key_field(
        0.0, "training images held out to choose the best epoch: a number of images, or a fraction if below 1"
    )
    on_bad_image: Literal["fail", "skip"] = key_field(
        "fail", "stop at an image that cannot be read, or train without it"
    )
    resident: Literal["auto", "yes", "no"] = key_field(
        "auto", "keep the images on the device and augment them there: up to 2 GiB if auto, half its free memory if yes"
    )
    workers: int = key_field(4, "processes that load images that are not resident, at most one per core of the machine")
    mean: list[float] | None = key_field(
        None, "mean of the pixels of each channel, from 0 to 1; the model's default if null"
    )
    std: list[float] | None = key_field(
        None, "standard deviation of the pixels of each channel; the model's default if null"
    )
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"] = key_field(
        "bicubic", "interpolation of resized images"
    )
    crop_pct: float | None = key_field(
        None, "the part of the resized image that evaluation crops from its center; the model's default if null"
    )
    longer_side: int = key_field(1333, "largest longer side in pixels of resized images with boxes or masks")
    eval_shorter_side: int | None = key_field(
        None, "shorter side in pixels of images with boxes or masks in evaluation; the largest shorter_side if null"
    )

    # Augmentation of training images.
    crop: Literal["resized", "scaled", "jittered", "padded", "none"] = key_field(
        "resized",
        "random crops: a resized part of the image, a window of the image resized to a random shorter side (scale "
        "augmentation) or by a random factor, a shift of the padded image, or the resized image",
    )
    crop_scale: list[float] = key_field([0.08, 1.0], "smallest and largest part of the image's area, for crop=resized")
    crop_ratio: list[float] = key_field(
        [3 / 4, 4 / 3], "smallest and largest ratio of width to height, for crop=resized"
    )
    shorter_side: list[int] = key_field(
        [256, 480],
        "smallest and largest shorter side of the resized image in pixels, for crop=scaled, and for crop=none with "
        "boxes or masks",
    )
    scale_jitter: list[float] = key_field(
        [4 / 5, 5 / 4], "smallest and largest scale relative to the image that just fits, for crop=jittered"
    )
    padding: int = key_field(4, "pixels on each side, for crop=padded")
    flip: float = key_field(0.5, "probability of a horizontal flip")
    vertical_flip: float = key_field(0.0, "probability of a vertical flip, for images with boxes or masks")
    color_jitter: float = key_field(
        0.0, "strength of random changes of brightness, contrast and saturation; 0 disables them"
    )
    auto_augment: str | None = key_field(
        None, "RandAugment or AutoAugment in timm's notation: rand-m9-mstd0.5-inc1, original, v0"
    )
    erasing: float = key_field(0.0, "probability of erasing a random rectangle")
    erasing_mode: Literal["pixel", "const"] = key_field(
        "pixel", "fill erased rectangles with noise, or with the mean color"
    )
    mixup: float = key_field(0.0, "alpha of Mixup's Beta distribution; 0 disables Mixup")
    cutmix: float = key_field(0.0, "alpha of CutMix's Beta distribution; 0 disables CutMix")
    mix_probability: float = key_field(1.0, "probability of mixing a batch, if Mixup or CutMix is enabled")
    mix_switch: float = key_field(0.5, "probability of CutMix, if Mixup and CutMix are both enabled")
    repeated_augmentation: int = key_field(1, "number of differently augmented views of an image in one batch")
    label_smoothing: float = key_field(0.0, "probability that smoothed labels spread over all classes")

    # Optimization.
    epochs: int = key_field(100, "number of epochs")
    epoch_steps: int | None = key_field(
        None, "steps in an epoch, after which the network is evaluated; one pass over the training images if null"
    )
    eval_every: int = key_field(1, "epochs from one evaluation to the next; the last epoch is always evaluated")
    batch_size: int = key_field(256, "images per update, over all ranks and accumulated splits")
    accumulate: int = key_field(1, "number of splits of a rank's batch, over which gradients are accumulated")
    optimizer: str = key_field("sgd", "timm's name of the optimizer: sgd uses Nesterov momentum, momentum does not")
    lr: float = key_field(0.1, "learning rate after the warm-up")
    lr_batch_size: int | None = key_field(
        None, "the batch size that lr is meant for; lr and min_lr are scaled linearly to batch_size"
    )
    momentum: float = key_field(0.9, "momentum, for optimizers that have it")
    weight_decay: float = key_field(1e-4, "weight decay")
    decay_norms_and_biases: bool = key_field(True, "apply weight decay also to norms, biases and other vectors")
    optimizer_options: Options = key_field({}, "further options of the optimizer, such as betas, eps and alpha")
    schedule: Literal["cosine", "step", "multistep", "poly", "constant"] = key_field(
        "cosine", "how the learning rate decays"
    )
    schedule_on: Literal["epoch", "step"] = key_field(
        "epoch", "change the learning rate after every epoch or every step"
    )
    warmup_epochs: float = key_field(
        0.0, "epochs in which the learning rate rises linearly; shortened to a fifth of a run that is not longer"
    )
    warmup_steps: int = key_field(0, "steps of the warm-up, instead of warmup_epochs, for schedule_on=step")
    warmup_schedule: Literal["linear", "constant"] = key_field("linear", "rise linearly from warmup_lr, or stay at it")
    warmup_lr: float = key_field(0.0, "learning rate at the start of the warm-up")
    min_lr: float = key_field(0.0, "the minimum of the cosine schedule")
    decay_epochs: float = key_field(30.0, "epochs between two decays, for schedule=step")
    decay_rate: float = key_field(0.1, "factor of each decay, for schedule=step and multistep; the power, for poly")
    milestones: list[int] = key_field([], "epochs at which the learning rate decays, for schedule=multistep")
    clip_grad: float | None = key_field(None, "maximum norm of the gradient; not clipped if null")
    ema: float = key_field(0.0, "decay of the moving average of the weights, which is then evaluated; 0 disables it")

    # Fine-tuning from pretrained or weights. New parameters are those that were not loaded.
    new_lr_scale: float = key_field(
        1.0, "learning rate of new parameters, those of the mechanism and of a new classifier, relative to lr"
    )
    mechanism_lr_scale: float | None = key_field(
        None, "learning rate of the new parameters of a mechanism, relative to lr; new_lr_scale if null"
    )
    layer_decay: float | None = key_field(
        None, "factor of the learning rate of loaded parameters from each layer to the one before it; none if null"
    )
    freeze_epochs: float = key_field(0.0, "epochs at the start in which only new parameters are trained")
    freeze_backbone: bool = key_field(False, "train only new parameters for the whole run")

    # The machine, and what is written.
    seed: int = key_field(0, "seed of the initial weights, the order of the images and all augmentation")
    device: str | None = key_field(None, "cpu or cuda; cuda if available, if null")
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = key_field(
        "float32", "precision of the forward pass; tf32 applies to GPUs, float16 needs one"
    )
    deterministic: bool = key_field(False, "use only deterministic kernels on a GPU, which are slower")
    channels_last: bool = key_field(False, "store images and weights in channels-last memory format")
    compile: Literal["no", "default", "tuned"] = key_field(
        "no", "compile the network with torch.compile; tuned takes longer to compile and runs faster"
    )
    cuda_graph: Literal["auto", "yes", "no"] = key_field(
        "auto", "replay the training step as one CUDA graph; needs one GPU and resident images"
    )
    sharding: Literal["none", "fsdp"] = key_field(
        "none", "whether each rank holds a copy of the model or a shard of it"
    )
    sync_batchnorm: bool = key_field(False, "compute batch norm statistics over all GPUs")
    eval_batch_size: int | None = key_field(
        None, "images per rank in evaluation; chosen from batch_size and the image size if null"
    )
    checkpoint_steps: int = key_field(
        0, "also save a checkpoint every N steps; 0: only at the end of an epoch and when stopped"
    )
    tensorboard: bool = key_field(True, "write TensorBoard logs")
    wandb: str | None = key_field(None, "name of a Weights & Biases project to log to")

    def __post_init__(self) -> None:
        try:
            task = task_class(self.task)
        except TaskError as error:
            raise RecipeError(str(error)) from error
        for check, message in RULES:
            if not check(self):
                raise RecipeError(message.format(**dataclasses.asdict(self)))
        unsupported = task.unsupported_reason(dataclasses.asdict(self))
        if unsupported:
            raise RecipeError(unsupported)

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


_TYPES = typing.get_type_hints(Recipe)
_NAMES = [f.name for f in dataclasses.fields(Recipe)]


def list_recipes() -> list[str]:
    """Returns the names of the recipes that come with the package."""
    files = resources.files("interlayer").joinpath("recipes").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def list_keys() -> dict[str, KeyDescription]:
    """Returns all keys of recipes with their type, default and meaning, in order."""
    return describe_keys(Recipe)


def recipes_with(key: str) -> dict[str, Any]:
    """Returns the recipes of the package that set a key, with their values."""
    found = {name: _values_of(name, seen=()) for name in list_recipes()}
    return {name: values[key] for name, values in found.items() if key in values}


def recipe_text(name: str) -> str:
    """Returns the text of a recipe, given the name of one in the package or the path of a file."""
    if name in list_recipes():
        return resources.files("interlayer").joinpath("recipes", f"{name}.yaml").read_text()
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise RecipeError(f"{path}: no such recipe file")
        return path.read_text()
    near = nearest(name, [*list_recipes(), *_NAMES])
    raise RecipeError(f"unknown recipe {name!r}{near or ';'} `interlayer recipes` lists them")


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
            raise unknown_key(key, _NAMES)
    return Recipe(**{key: coerce(key, value, _TYPES[key]) for key, value in values.items()})


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
        raise unknown_key(first, _NAMES)
    if typing.get_origin(_TYPES[first]) is not dict:
        raise RecipeError(f"{first} holds one value, not options: write {first}=...")
    inner = values[first] = dict(values.get(first) or {})
    for name in rest[:-1]:
        inner[name] = dict(inner.get(name) or {})
        inner = inner[name]
    inner[rest[-1]] = as_number(value)
