"""The record of a comparison, from which it can be resumed. It is written before the first run starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..training import Recipe, TrainingError
from ..training.files import write_json, write_text

RECORD_FILE = "networks.json"
RECIPE_FILE = "shared_recipe.yaml"
Controls = bool | Literal["mildest"]


@dataclass(frozen=True)
class ComparisonRecord:
    """What a comparison consists of, besides the recipe that its runs share.

    Args:
        models: the networks; the first one is the baseline.
        seeds: the seeds of each network's runs.
        together: the number of runs that share the GPU, if it was given.
        command: the command that started the comparison.
        control: whether controls of the networks were asked for; they are among ``models``.
        epochs: the epochs of each network, if all train for the same time. They are chosen when it has been measured.
        epoch_seconds: the training time of an epoch of each network, if it was measured before the runs.
        costs: the fields of `StaticCost` of each network; empty in the record of an earlier version.
        shared: the number of runs that shared the device.
        equal_time: whether all networks train for the same time.
        side_by_side: the number of runs that train in processes of their own, if it was given.
    """

    models: list[str]
    seeds: list[int]
    together: int | None
    command: str
    control: Controls = False
    epochs: Mapping[str, int] = field(default_factory=dict)
    epoch_seconds: Mapping[str, float] = field(default_factory=dict)
    costs: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    shared: int = 1
    equal_time: bool = False
    side_by_side: int | None = None


def write_record(folder: Path, recipe: Recipe, record: ComparisonRecord) -> None:
    """Writes the record of a comparison, and its recipe unless a resumed comparison has already written it."""
    if not (folder / RECORD_FILE).exists():
        write_text(folder / RECIPE_FILE, recipe.to_yaml(record.command))
    write_json(folder / RECORD_FILE, asdict(record))


def read_record(folder: Path) -> ComparisonRecord:
    """Reads the record of a comparison."""
    path = folder / RECORD_FILE
    try:
        record = ComparisonRecord(**json.loads(path.read_text()))
        return replace(record, equal_time=record.equal_time or bool(record.epochs))  # an earlier version had only these
    except (OSError, TypeError, json.JSONDecodeError) as error:
        raise TrainingError(f"{path} cannot be read as the record of a comparison: {error}") from error
