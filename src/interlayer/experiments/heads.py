"""The headline metric of finished runs as a function of their networks' number of heads (CB, Figure 9)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..analysis.heads import HeadsPoint, attention_heads
from ..analysis.shapes import Memory, RememberedShapes
from ..models.build import plain_name, split_name
from ..tasks import Metric
from ..training import Recipe, TrainingError
from ..training.recipe import read_recipe
from ..training.run_folder import MACHINE_KEYS
from ..training.setup import build_network
from ..training.summary import read_summary
from .statistics import interval_half_width, paired_difference
from .trained import task_of

# options that set the number of heads, at a given width, of timm's networks and of layer attention
HEAD_OPTION = re.compile(r"(^|_)(num_)?heads$|^head_dim$|^dim_head$|^channels_per_head$")
MOST_FOLDERS = 4  # levels of folders below a given one in which runs are searched


@dataclass(frozen=True)
class HeadsRun:
    """A finished run.

    Args:
        folder: its folder.
        heads: the number of heads of its network.
        seed: its seed.
        value: the headline metric on the test images.
        model: the name of its network, without options that set the number of heads.
        settings: the values of its recipe that distinguish it from other runs, except for the seed and the heads.
    """

    folder: Path
    heads: float
    seed: int
    value: float
    model: str
    settings: Mapping[str, Any]


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Returns the folders of the finished runs in the given folders: runs, comparisons, or folders that contain them.

    Raises:
        TrainingError: a folder contains no finished run.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise TrainingError(f"{folder}: no such folder")
        levels = ["/".join(["*"] * level) for level in range(1, MOST_FOLDERS + 1)]
        candidates = [folder, *(path for level in levels for path in sorted(folder.glob(level)))]
        runs = [path for path in candidates if (path / "summary.json").is_file() and (path / "recipe.yaml").is_file()]
        if not runs:
            raise TrainingError(
                f"{folder} holds no finished run: give folders that `interlayer train` or compare wrote"
            )
        found.update(dict.fromkeys(runs))
    return list(found)


def read_heads_runs(folders: Sequence[Path]) -> tuple[Metric, list[HeadsRun]]:
    """Reads finished runs and returns their headline metric and the number of heads of the network of each.

    The network of a run is built on the meta device, without its weights.

    Raises:
        TrainingError: a run has no attention, or the runs have different metrics.
    """
    memory: Memory = {}
    metrics: dict[Metric, Path] = {}
    runs = []
    for folder in find_runs(folders):
        summary, recipe = read_summary(folder), read_recipe(folder / "recipe.yaml")
        task = task_of(recipe, summary.get("classes", []))
        with torch.device("meta"), RememberedShapes(memory):
            network = build_network(task)
        try:
            heads = attention_heads(network)
        except ValueError as error:
            raise TrainingError(f"{folder}: {error}") from error
        metrics.setdefault(task.headline, folder)
        value = summary["test"].get(task.headline.name)
        if value is None:
            raise TrainingError(f"{folder} has no {task.headline.title} on test images")
        runs.append(HeadsRun(folder, heads, recipe.seed, value, _model_without_heads(recipe), _settings(recipe)))
    if len(metrics) > 1:
        (first, one), (second, other), *_ = metrics.items()
        raise TrainingError(f"{one} has the metric {first.title} and {other} {second.title}: give runs of one task")
    return next(iter(metrics)), runs


def _model_without_heads(recipe: Recipe) -> str:
    backbone, mechanisms = split_name(recipe.model)
    for mechanism, options in mechanisms:
        kept = [f"{key}={value}" for key, value in options.items() if not HEAD_OPTION.search(key)]
        backbone += f"+{mechanism}" + (f":{','.join(kept)}" if kept else "")
    return backbone


def _settings(recipe: Recipe) -> dict[str, Any]:
    values = dataclasses.asdict(recipe)
    for key in (*MACHINE_KEYS, "seed", "model"):
        values.pop(key)
    for key in ("model_options", "attach_options"):
        values[key] = {name: value for name, value in values[key].items() if not HEAD_OPTION.search(name)}
    return values


def group_runs(runs: Sequence[HeadsRun]) -> dict[str, list[HeadsRun]]:
    """Returns runs that differ only in the number of heads and the seed, by the name of their network.

    Networks of the same name are distinguished by the settings in which they differ.

    Raises:
        TrainingError: two runs have the same network, number of heads and seed, or the number of heads never differs.
    """
    groups: list[list[HeadsRun]] = []
    for run in runs:
        alike = (g for g in groups if (g[0].model, g[0].settings) == (run.model, run.settings))
        group = next(alike, None)
        if group is None:
            groups.append([run])
            continue
        same = next((other for other in group if (other.heads, other.seed) == (run.heads, run.seed)), None)
        if same is not None:
            raise TrainingError(f"{same.folder} and {run.folder} have the same network and seed: give one of them")
        group.append(run)
    if all(len({run.heads for run in group}) == 1 for group in groups):
        numbers = ", ".join(f"{number:g}" for number in sorted({run.heads for run in runs}))
        raise TrainingError(
            f"no two runs differ only in the number of heads (got {numbers}): train networks with different values of "
            "model_options.num_heads"
        )
    return dict(zip(_names(groups), groups, strict=True))


def _names(groups: Sequence[Sequence[HeadsRun]]) -> list[str]:
    models = [group[0].model for group in groups]
    names = []
    for group, model in zip(groups, models, strict=True):
        settings = [other[0].settings for other, name in zip(groups, models, strict=True) if name == model]
        keys = [key for key, value in group[0].settings.items() if any(other[key] != value for other in settings)]
        names.append(", ".join([model, *(f"{key}={group[0].settings[key]}" for key in keys)]))
    return names


def heads_curve(runs: Sequence[HeadsRun]) -> list[HeadsPoint]:
    """Returns the mean of the metric and its interval over seeds for each number of heads."""
    by_heads: dict[float, list[float]] = {}
    for run in runs:
        by_heads.setdefault(run.heads, []).append(run.value)
    points = []
    for heads, values in sorted(by_heads.items()):
        half_width = interval_half_width(values) if len(values) > 1 else None
        points.append(HeadsPoint(heads, sum(values) / len(values), half_width, len(values)))
    return points


def heads_gains(groups: Mapping[str, Sequence[HeadsRun]]) -> dict[str, list[HeadsPoint]]:
    """Returns the differences of networks to the plain network, paired by seed, for each number of heads.

    Only networks with the settings of a plain network have them.
    """
    gains: dict[str, list[HeadsPoint]] = {}
    for name, runs in groups.items():
        backbone = plain_name(runs[0].model)
        if backbone == runs[0].model:
            continue
        settings = {**runs[0].settings, "attach_options": {}}
        plain = {
            (run.heads, run.seed): run.value
            for group in groups.values()
            for run in group
            if run.model == backbone and run.settings == settings
        }
        pairs: dict[float, list[tuple[float, float]]] = {}
        for run in runs:
            if (run.heads, run.seed) in plain:
                pairs.setdefault(run.heads, []).append((plain[run.heads, run.seed], run.value))
        for heads, values in sorted(pairs.items()):
            found = paired_difference([first for first, _ in values], [second for _, second in values])
            half_width = None if found.high is None else found.high - found.mean
            gains.setdefault(name, []).append(HeadsPoint(heads, found.mean, half_width, len(values)))
    return gains
