"""The record of a comparison, from which it can be resumed. It is written before the first run starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..training import Recipe, TrainingError
from ..training.files import write_json, write_text

RECORD_FILE = "networks.json"
RECIPE_FILE = "shared_recipe.yaml"


@dataclass(frozen=True)
class ComparisonRecord:
    """What a comparison consists of, besides the recipe that its runs share.

    Args:
        models: the networks; the first one is the baseline.
        seeds: the seeds of each network's runs.
        together: the number of runs that share the GPU, if it was given.
        command: the command that started the comparison.
    """

    models: list[str]
    seeds: list[int]
    together: int | None
    command: str


def write_record(
    folder: Path, recipe: Recipe, models: Sequence[str], seeds: Sequence[int], together: int | None, command: str
) -> None:
    """Writes the recipe and the record of a comparison, unless a resumed comparison has already written them."""
    if not (folder / RECORD_FILE).exists():
        write_text(folder / RECIPE_FILE, recipe.to_yaml(command))
        write_json(folder / RECORD_FILE, asdict(ComparisonRecord(list(models), list(seeds), together, command)))


def read_record(folder: Path) -> ComparisonRecord:
    """Reads the record of a comparison."""
    path = folder / RECORD_FILE
    try:
        return ComparisonRecord(**json.loads(path.read_text()))
    except (OSError, TypeError, json.JSONDecodeError) as error:
        raise TrainingError(f"{path} cannot be read as the record of a comparison: {error}") from error
