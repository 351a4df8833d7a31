"""Comparison of several networks under one recipe, over several seeds. See statistics.py for the statistics."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..analysis import Contribution, Setting, combined, count_flops, count_parameters, measure_memory
from ..models.build import ModelError, check_network, check_size, plain_name, split_name
from ..tasks import Metric, Task, task_class
from ..training import Progress, Recipe, Trainer, TrainingError
from ..training.data import ImageTransform, open_data
from ..training.files import make_folder, write_json
from ..training.logs import read_metrics
from ..training.memory import smaller_batch_advice
from ..training.overview import Overview
from ..training.processes import Processes, init_processes
from ..training.run_folder import check_same_recipe
from ..training.setup import build_network, check_start
from ..training.summary import read_contribution, read_summary
from .record import write_record
from .statistics import Difference, paired_difference, spread, verdict
from .trained import task_of
from .turns import in_turns

TOGETHER = 4  # default number of runs that share one GPU


@dataclass(frozen=True)
class NetworkCost:
    """The cost of a network under the recipe.

    Args:
        parameters: number of parameters.
        flops: multiply-adds per image.
        memory: peak memory of a training step in bytes.
        epoch_seconds: median training time of an epoch, without the first one.
    """

    parameters: int
    flops: int
    memory: int
    epoch_seconds: float


@dataclass(frozen=True)
class Result:
    """The result of one network over all seeds.

    Args:
        model: name of the network.
        folders: the folders of its runs, one per seed.
        values: the headline metric on the test images, one per seed.
        cost: the cost of the network.
        difference: the difference to the first network; None for the first network.
        contribution: the contribution of its mechanisms over all seeds; None if it has none, or if a run was finished
            by an earlier version that did not measure it.
    """

    model: str
    folders: list[Path]
    values: list[float]
    cost: NetworkCost
    difference: Difference | None
    contribution: Contribution | None = None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds; NaN for a single seed."""
        return spread(self.values)


@dataclass(frozen=True)
class Comparison:
    """The comparison of several networks under one recipe.

    Args:
        recipe: the recipe that all runs share.
        folder: the folder of the comparison.
        metric: the headline metric of the task.
        seeds: the seeds of each network's runs.
        results: the result of each network; the first one is the baseline.
        together: the number of runs that shared the device.
        command: the command that reproduces the comparison.
        notes: messages to the user about the data.
    """

    recipe: Recipe
    folder: Path
    metric: Metric
    seeds: list[int]
    results: list[Result]
    together: int
    command: str
    notes: list[str] = field(default_factory=list)

    def verdicts(self) -> list[str]:
        """Returns a sentence about the difference of each network to the first, and one about its mechanism."""
        first, texts = self.results[0], []
        for result in self.results:
            if result.difference is not None:
                texts.append(verdict(result.model, first.model, result.difference, self.metric, len(self.seeds)))
            if result.contribution is not None:
                texts.append(f"{result.model}: {result.contribution.sentence}.")
        return texts


def networks_of(models: Sequence[str]) -> list[str]:
    """Returns the networks to compare. A single network is compared with its plain backbone, which comes first."""
    names = list(dict.fromkeys(models))
    if len(names) == 1 and plain_name(names[0]) != names[0]:
        names.insert(0, plain_name(names[0]))
    if len(names) < 2:
        raise TrainingError(
            f"nothing to compare {names[0]} with: name two networks, or one with a mechanism such as "
            f"{names[0]}+mrla_light"
        )
    return names


def recipe_for(recipe: Recipe, model: str, seed: int) -> Recipe:
    """Returns the recipe of one run of a comparison."""
    one_mechanism = len(split_name(model)[1]) == 1
    return recipe.replace(model=model, seed=seed, attach_options=recipe.attach_options if one_mechanism else {})


def compare(
    recipe: Recipe,
    models: Sequence[str],
    folder: Path,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    resume: bool = False,
    together: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    show: Callable[[Progress], None] = lambda progress: None,
    on_start: Callable[[Overview], None] = lambda overview: None,
    command: str = "",
) -> Comparison:
    """Trains every network with every seed and compares them with the first.

    Args:
        recipe: the recipe that all runs share.
        models: model names, NAME or NAME+MECHANISM.
        folder: the folder of the comparison, with a subfolder for each run.
        seeds: the seeds of each network's runs.
        resume: whether to resume the comparison that is in the folder.
        together: the number of runs that share the GPU at a time; if None, chosen by the device (one on a CPU).
        stop: called after every step; if it returns True, checkpoints are saved and `Stopped` is raised.
        show: called with the progress of the runs.
        on_start: called on rank 0 with what each run understood, before its first step.
        command: the command that reproduces this comparison, for the record.
    """
    names = networks_of(models)
    _check_names(names)
    if not seeds or len(set(seeds)) != len(seeds):
        raise TrainingError(f"seeds must be different numbers, got {list(seeds)}")
    processes = init_processes(recipe)
    folder = processes.broadcast(folder)
    data = open_data(recipe)
    costs = {}
    for name in names:  # before any training, so that unknown names and unsuitable networks fail early
        show(Progress(folder, f"measuring {name}", 0, recipe.epochs, 0, 0))
        check_start(recipe_for(recipe, name, seeds[0]))
        costs[name] = _static_cost(recipe_for(recipe, name, seeds[0]), data.classes, processes)
    make_folder(folder)
    if processes.is_main:
        write_record(folder, recipe, names, seeds, together, command)
    together = _together(together, recipe, processes)
    for name in names:
        unfinished = []
        for seed in seeds:
            path = _run_folder(folder, name, seed)
            if resume and (path / "summary.json").exists():
                check_same_recipe(path, recipe_for(recipe, name, seed))
                show(Progress(path, "done", recipe.epochs, recipe.epochs, 0, 0))
            else:
                unfinished.append((seed, path))
        trainers = (
            Trainer(
                recipe_for(recipe, name, seed), path, resume=resume, data=data, processes=processes, stop=stop,
                show=show, on_start=on_start, command=command, separate_random_state=together > 1,
            )
            for seed, path in unfinished
        )  # fmt: skip
        for progress in in_turns(trainers, together):
            show(progress)
    metric = task_class(recipe.task).headline
    folders = {name: [_run_folder(folder, name, seed) for seed in seeds] for name in names}
    results = _results(folders, metric, costs)
    shared = min(together, len(seeds))
    comparison = Comparison(recipe, folder, metric, list(seeds), results, shared, command, list(data.notes))
    if processes.is_main:
        write_json(folder / "comparison.json", _as_json(comparison))
    return comparison


def _check_names(names: Sequence[str]) -> None:
    """Raises if a name is not known, before any network is measured, which can take minutes."""
    for name in names:
        try:
            check_network(name)
        except ModelError as error:
            raise TrainingError(str(error)) from error


def _results(folders: dict[str, list[Path]], metric: Metric, costs: dict[str, tuple[int, int, int]]) -> list[Result]:
    """Reads the finished runs of every network and compares each network with the first."""
    results: list[Result] = []
    for name, paths in folders.items():
        summaries = [read_summary(path) for path in paths]
        tests = [summary["test"] for summary in summaries]
        values = [float(test[metric.name]) for test in tests]
        resolution = metric.resolution(tests[0]["images"])
        difference = paired_difference(results[0].values, values, resolution) if results else None
        cost = NetworkCost(*costs[name], _epoch_seconds(paths))
        results.append(Result(name, paths, values, cost, difference, _contribution(summaries)))
    return results


def _contribution(summaries: Sequence[dict[str, Any]]) -> Contribution | None:
    """Returns the contribution of a network's mechanisms over all its runs."""
    records = [read_contribution(summary) for summary in summaries]
    known = [record for record in records if record is not None]
    return combined(known) if len(known) == len(records) else None


def _together(asked: int | None, recipe: Recipe, processes: Processes) -> int:
    """Returns the number of runs that share the device. Several runs need a single process."""
    possible = processes.world_size == 1 and recipe.precision != "float16"
    if asked is None:
        return TOGETHER if possible and processes.device.type == "cuda" else 1
    if asked > 1 and not possible:
        raise TrainingError(f"--together {asked} needs one process and a precision other than float16")
    return asked


class _LossOf(nn.Module):
    """A network that computes the loss of its task on made-up targets."""

    def __init__(self, task: Task, network: nn.Module) -> None:
        super().__init__()
        self.task, self.network = task, network

    def forward(self, images: Tensor) -> Any:
        targets = self.task.example_targets(images)
        return self.task.loss(self.task.forward(self.network, images, targets), targets)[0]


def _static_cost(recipe: Recipe, classes: Sequence[str], processes: Processes) -> tuple[int, int, int]:
    """Returns the parameters, the multiply-adds per image and the peak memory of a training step in bytes."""
    device = processes.device
    task = task_of(recipe, classes)
    network = build_network(task)
    if task.annotations == "labels":
        check_size(network, recipe.model, ImageTransform.of(network, recipe).size)
    else:
        network.to(device)  # images are too large to be counted on the CPU
    flops = count_flops(network, task.image_size, convention="torch")
    parameters = count_parameters(network)
    precision: Any = {"tf32": "float32"}.get(recipe.precision, recipe.precision)
    images = max(1, recipe.batch_size // (recipe.accumulate * processes.world_size))
    setting = Setting(images, task.image_size, device.type, precision, recipe.channels_last)
    try:
        memory = measure_memory(network if task.annotations == "labels" else _LossOf(task, network), setting)
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"the GPU's memory does not hold a training step of {recipe.model} with {images} images: "
            f"{smaller_batch_advice(recipe)}"
        ) from error
    if device.type == "cuda":
        del network
        torch.cuda.empty_cache()
    return parameters, flops, memory


def _epoch_seconds(folders: Sequence[Path]) -> float:
    seconds = []
    for folder in folders:
        rows = [row["seconds"] for row in read_metrics(folder)]
        seconds += rows[1:] if len(rows) > 1 else rows
    return statistics.median(seconds)


def _run_folder(folder: Path, model: str, seed: int) -> Path:
    return folder / re.sub(r"[^\w.+-]", "_", model) / f"seed{seed}"


def _plural(name: str) -> str:
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"


def _as_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "metric": comparison.metric.name,
        "models": [
            {
                "model": result.model,
                _plural(comparison.metric.name): result.values,
                "values": result.values,
                "mean": result.mean,
                "spread": None if math.isnan(result.spread) else result.spread,
                **asdict(result.cost),
                "difference": asdict(result.difference) if result.difference else None,
                "within_noise": result.difference.within_noise if result.difference else None,
                "contribution": result.contribution.as_dict() if result.contribution else None,
                "runs": [str(path) for path in result.folders],
            }
            for result in comparison.results
        ],
        "seeds": comparison.seeds,
        "verdicts": comparison.verdicts(),
        "together": comparison.together,
        "command": comparison.command,
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
