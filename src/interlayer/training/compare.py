"""Several networks under one recipe, over several seeds, and what can be said of the difference.

Runs of one seed see the same batches with the same augmentation, whatever the network, so differences are taken pair by
pair. Their mean has Student's interval over the seeds; where that holds zero, the difference is reported as noise.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..analysis import Setting, count_flops, count_parameters, measure_memory
from ..models.build import check_size, plain_name, split_name
from .data import ImageTransform, open_data
from .files import TrainingError, make_folder, write_json
from .logs import read_metrics
from .network import build_network
from .processes import Processes, init_processes
from .recipe import Recipe
from .run_folder import check_same_recipe
from .summary import read_summary
from .trainer import Progress, Stopped, Trainer

CONFIDENCE = 0.95
TOGETHER = 4  # runs that share one GPU


@dataclass(frozen=True)
class NetworkCost:
    """What a network costs under the recipe; seconds are the median epoch, the first left out."""

    parameters: int
    flops: int
    memory: int
    epoch_seconds: float


@dataclass(frozen=True)
class Difference:
    """The paired difference of accuracies to the first network, in fractions.

    Args:
        low, high: the confidence interval of the mean; None for a single seed.
    """

    mean: float
    low: float | None
    high: float | None

    @property
    def within_noise(self) -> bool:
        return self.low is None or self.high is None or self.low <= 0 <= self.high


@dataclass(frozen=True)
class Result:
    """One network over all seeds."""

    model: str
    folders: list[Path]
    accuracies: list[float]
    cost: NetworkCost
    difference: Difference | None  # None for the first network

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else math.nan


@dataclass(frozen=True)
class Comparison:
    """Networks compared under one recipe."""

    recipe: Recipe
    folder: Path
    seeds: list[int]
    results: list[Result]
    together: int
    command: str
    notes: list[str] = field(default_factory=list)

    def verdicts(self) -> list[str]:
        """What can be said of each network against the first, in words."""
        return [verdict(r, self.results[0].model, len(self.seeds)) for r in self.results[1:]]


def paired_difference(first: Sequence[float], second: Sequence[float], resolution: float = 0.0) -> Difference:
    """Mean of second - first, pair by pair, with Student's interval.

    Args:
        resolution: the smallest difference there can be, one test image: the interval reaches at least that far.
    """
    from scipy.special import stdtrit

    differences = [b - a for a, b in zip(first, second, strict=True)]
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return Difference(mean, None, None)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    reach = max(float(stdtrit(len(differences) - 1, (1 + CONFIDENCE) / 2)) * error, resolution)
    return Difference(mean, mean - reach, mean + reach)


def points(value: float) -> str:
    """A difference of fractions in percentage points."""
    return f"{value * 100:+.2f}"


def verdict(result: Result, first: str, seeds: int) -> str:
    """One honest sentence about a difference."""
    difference = result.difference
    assert difference is not None
    mean = points(difference.mean)
    if difference.low is None or difference.high is None:
        return f"{result.model} against {first}: {mean} points with one seed, which says nothing about noise: use more."
    interval = f"95% interval {points(difference.low)} to {points(difference.high)}, {seeds} seeds"
    if difference.within_noise:
        unknown = "these runs do not tell the two apart"
        return f"{result.model} against {first}: {mean} points, within noise ({interval}): {unknown}."
    word = "better" if difference.mean > 0 else "worse"
    return f"{result.model} is {word} than {first} by {abs(difference.mean) * 100:.2f} points ({interval})."


def networks_of(models: Sequence[str]) -> list[str]:
    """What is compared: the networks named, or one network and the plain backbone it extends, plain first."""
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
    """The recipe of one run of a comparison."""
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
    command: str = "",
) -> Comparison:
    """Train every network with every seed and compare them with the first.

    Args:
        recipe: the setting all runs share.
        models: names, or NAME+MECHANISM.
        folder: a folder for the comparison; each run gets one inside.
        together: runs that share the GPU at a time; chosen by the data where not given. One on a CPU.
        resume: go on with a comparison in the folder.
    """
    names = networks_of(models)
    if not seeds or len(set(seeds)) != len(seeds):
        raise TrainingError(f"seeds must be different numbers, got {list(seeds)}")
    processes = init_processes(recipe)
    folder = processes.broadcast(folder)
    data = open_data(recipe)
    costs = {}
    for name in names:  # before any training: an unknown name or a network that does not fit is found here
        show(Progress(folder, f"measuring {name}", 0, recipe.epochs, 0, 0))
        costs[name] = _static_cost(recipe_for(recipe, name, seeds[0]), len(data.classes), processes)
    make_folder(folder)
    together = _together(together, recipe, processes)
    for name in names:
        unfinished = []
        for seed in seeds:
            path = folder / _folder_name(name) / f"seed{seed}"
            if resume and (path / "summary.json").exists():
                check_same_recipe(path, recipe_for(recipe, name, seed))
                show(Progress(path, "done", recipe.epochs, recipe.epochs, 0, 0))
            else:
                unfinished.append((seed, path))
        trainers = (
            Trainer(
                recipe_for(recipe, name, seed), path, resume=resume, data=data, processes=processes,
                stop=stop, show=show, command=command, separate_random_state=together > 1,
            )
            for seed, path in unfinished
        )  # fmt: skip
        for progress in in_turns(trainers, together):
            show(progress)
    results: list[Result] = []
    for name in names:
        folders = [folder / _folder_name(name) / f"seed{seed}" for seed in seeds]
        tests = [read_summary(path)["test"] for path in folders]
        accuracies = [float(test["accuracy"]) for test in tests]
        cost = NetworkCost(*costs[name], _epoch_seconds(folders))
        one_image = 1 / tests[0]["images"]
        difference = paired_difference(results[0].accuracies, accuracies, one_image) if results else None
        results.append(Result(name, folders, accuracies, cost, difference))
    shared = min(together, len(seeds))
    comparison = Comparison(recipe, folder, list(seeds), results, shared, command, list(data.notes))
    if processes.is_main:
        write_json(folder / "comparison.json", _as_json(comparison))
    return comparison


def in_turns(trainers: Iterator[Trainer], together: int) -> Iterator[Progress]:
    """Run trainers, up to `together` at a time, a step of each in turn. Asked to stop, each saves a checkpoint."""
    active: list[tuple[Trainer, Iterator[Progress]]] = []
    trainers = iter(trainers)
    stopped: Stopped | None = None
    try:
        while True:
            while stopped is None and len(active) < together and (trainer := next(trainers, None)) is not None:
                active.append((trainer, trainer.run()))
            if not active:
                break
            for entry in list(active):
                trainer, steps = entry
                try:
                    progress = next(steps, None)
                except Stopped as asked:
                    stopped, progress = asked, None
                if progress is None:
                    trainer.close()
                    active.remove(entry)
                else:
                    yield progress
        if stopped is not None:
            raise stopped
    finally:
        for trainer, _ in active:
            trainer.close()


def _together(asked: int | None, recipe: Recipe, processes: Processes) -> int:
    """How many runs share the device: several only where one process drives one GPU."""
    possible = processes.world_size == 1 and recipe.precision != "float16"
    if asked is None:
        return TOGETHER if possible and processes.device.type == "cuda" else 1
    if asked > 1 and not possible:
        raise TrainingError(f"--together {asked} needs one process and a precision other than float16")
    return asked


def _static_cost(recipe: Recipe, classes: int, processes: Processes) -> tuple[int, int, int]:
    device = processes.device
    network = build_network(recipe.replace(pretrained=False, weights=None), classes)
    check_size(network, recipe.model, ImageTransform.of(network, recipe).size)
    flops = count_flops(network, recipe.image_size)
    parameters = count_parameters(network)
    precision: Any = {"tf32": "float32"}.get(recipe.precision, recipe.precision)
    images = max(1, recipe.batch_size // (recipe.accumulate * processes.world_size))
    setting = Setting(images, recipe.image_size, device.type, precision, recipe.channels_last)
    try:
        memory = measure_memory(network, setting)
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"the GPU's memory does not hold a training step of {recipe.model} with {images} images: set accumulate="
            f"{recipe.accumulate * 2} (the same training in smaller parts) or lower batch_size"
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


def _folder_name(model: str) -> str:
    return re.sub(r"[^\w.+-]", "_", model)


def _as_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "models": [
            {
                "model": result.model,
                "accuracies": result.accuracies,
                "mean": result.mean,
                "spread": None if math.isnan(result.spread) else result.spread,
                **asdict(result.cost),
                "difference": asdict(result.difference) if result.difference else None,
                "within_noise": result.difference.within_noise if result.difference else None,
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


__all__ = ["Comparison", "Difference", "Result", "compare", "paired_difference", "verdict"]
