"""Reads a comparison from its folder, also while some of its runs are not finished.

Differences are paired by the seeds that both networks have finished. A network without a finished run is not in the
results, and `Comparison.unfinished` names it with the seeds that are missing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..tasks import task_class
from ..training import Recipe, TrainingError
from ..training.recipe import read_recipe
from .costs import NetworkCost, StaticCost, median_epoch_seconds
from .record import RECIPE_FILE, ComparisonRecord, read_record
from .results import Comparison, read_results


def run_folder(folder: Path, model: str, seed: int) -> Path:
    """Returns the folder of one run of a comparison."""
    return folder / re.sub(r"[^\w.+-]", "_", model) / f"seed{seed}"


def finished_runs(record: ComparisonRecord, folder: Path) -> dict[str, dict[int, Path]]:
    """Returns the folders of the finished runs of every network, by seed."""
    paths = {name: {seed: run_folder(folder, name, seed) for seed in record.seeds} for name in record.models}
    return {
        name: {seed: path for seed, path in found.items() if (path / "summary.json").is_file()}
        for name, found in paths.items()
    }


def static_costs(record: ComparisonRecord, names: Sequence[str], folder: Path) -> dict[str, StaticCost]:
    """Returns the costs of networks that are recorded.

    Raises:
        TrainingError: the record has no costs, because an earlier version wrote it.
    """
    for name in names:
        if name not in record.costs:
            raise TrainingError(
                f"{folder} was written by an earlier version and has not recorded the cost of {name}: repeat its "
                "command with --resume"
            )
    return {name: StaticCost(**record.costs[name]) for name in names}


def read_comparison(
    folder: Path,
    *,
    recipe: Recipe | None = None,
    record: ComparisonRecord | None = None,
    notes: Sequence[str] = (),
) -> Comparison:
    """Returns the comparison of the runs in a folder that are finished.

    Args:
        folder: the folder of the comparison.
        recipe: the recipe that all runs share; that of the folder if None.
        record: what the comparison consists of; the record in the folder if None.
        notes: messages to the user about the data and the controls.

    Raises:
        TrainingError: the folder holds no comparison, no run of the first network is finished, or the record has no
            costs.
    """
    record = record or read_record(folder)
    recipe = recipe or read_recipe(folder / RECIPE_FILE)
    runs = {name: found for name, found in finished_runs(record, folder).items() if found}
    if record.models[0] not in runs:
        raise TrainingError(
            f"{folder}: no run of {record.models[0]} is finished, with which the other networks are compared"
        )
    static = static_costs(record, list(runs), folder)
    costs = {
        name: NetworkCost(
            *static[name],
            record.epoch_seconds[name]
            if record.shared > 1 and name in record.epoch_seconds
            else median_epoch_seconds(list(found.values())),
            record.epochs.get(name, recipe.epochs),
        )
        for name, found in runs.items()
    }
    missing = {name: [seed for seed in record.seeds if seed not in runs.get(name, {})] for name in record.models}
    metric = task_class(recipe.task).headline
    return Comparison(
        recipe,
        folder,
        metric,
        list(record.seeds),
        read_results(recipe, runs, metric, costs),
        record.shared,
        record.command,
        list(notes),
        equal_time=bool(record.epochs),
        unfinished={name: seeds for name, seeds in missing.items() if seeds},
    )
