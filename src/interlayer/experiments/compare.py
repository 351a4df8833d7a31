"""Comparison of several networks under one recipe, over several seeds.

See statistics.py for the statistics, attribution.py for what controls say, costs.py for what is measured beside the
headline metric, results.py for what a comparison returns, and stored.py for how it is read from its folder.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..models.build import ModelError, check_network, plain_name, split_name
from ..models.names import control_networks, same_network
from ..tasks import task_class
from ..training import Progress, Recipe, Stopped, Trainer, TrainingError
from ..training.data import Data, open_data
from ..training.files import make_folder, write_json
from ..training.overview import Overview
from ..training.processes import Processes, init_processes
from ..training.run_folder import check_same_recipe
from ..training.setup import check_start
from .costs import equal_time_epochs, measured_epoch_seconds, static_cost
from .record import RECORD_FILE, ComparisonRecord, Controls, read_record, write_record
from .results import Comparison, as_json, controls_among
from .side_by_side import train_side_by_side
from .stored import read_comparison, run_folder
from .turns import in_turns

TOGETHER = 4  # default number of runs that share one GPU


def networks_of(
    models: Sequence[str],
    *,
    control: Controls = False,
    attach_options: Mapping[str, Any] | None = None,
    task: str = "classification",
) -> list[str]:
    """Returns the networks to compare. A single network is compared with its plain backbone, which comes first.

    Args:
        models: names of networks.
        control: whether each network is followed by its controls, or by the "mildest" one of each of its mechanisms.
        attach_options: options of mechanisms that are not in the names, as in a recipe.
        task: the task of the networks. Controls that differ from the plain network only in what a classifier reads are
            left out in others.
    """
    names = list(dict.fromkeys(models))
    if len(names) == 1 and plain_name(names[0]) != names[0]:
        names.insert(0, plain_name(names[0]))
    if len(names) < 2:
        raise TrainingError(
            f"nothing to compare {names[0]} with: name two networks, or one with a mechanism such as "
            f"{names[0]}+mrla_light"
        )
    return _with_controls(names, control, attach_options, task) if control else names


def _with_controls(
    names: Sequence[str], control: Controls, attach_options: Mapping[str, Any] | None, task: str
) -> list[str]:
    """Returns the names, each followed by its controls that are not named already. Controls have no controls."""
    classifies = task_class(task).annotations == "labels"
    networks = {
        name: [n for n in control_networks(name, attach_options) if classifies or not n.control.in_classifier]
        for name in names
    }
    others = [network.name for found in networks.values() for network in found]
    wanted: list[str] = []
    for name, found in networks.items():
        wanted.append(name)
        if any(same_network(name, other) for other in others):
            continue
        mechanisms: set[str] = set()
        for network in found:
            if control == "mildest" and network.mechanism in mechanisms:
                continue
            mechanisms.add(network.mechanism)
            if not any(same_network(network.name, known) for known in (*names, *wanted)):
                wanted.append(network.name)
    return wanted


def recipe_for(recipe: Recipe, model: str, seed: int, epochs: int | None = None) -> Recipe:
    """Returns the recipe of one run of a comparison.

    Args:
        epochs: the number of epochs, if it differs from that of the recipe. The epochs at which the learning rate
            decays are moved in proportion.
    """
    one_mechanism = len(split_name(model)[1]) == 1
    changes: dict[str, Any] = {}
    if epochs is not None and epochs != recipe.epochs:
        ratio = epochs / recipe.epochs
        changes = {
            "epochs": epochs,
            "milestones": [round(epoch * ratio) for epoch in recipe.milestones],
            "decay_epochs": recipe.decay_epochs * ratio,
        }
    attach_options = recipe.attach_options if one_mechanism else {}
    return recipe.replace(model=model, seed=seed, attach_options=attach_options, **changes)


def compare(
    recipe: Recipe,
    models: Sequence[str],
    folder: Path,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    control: Controls = False,
    equal_time: bool = False,
    resume: bool = False,
    together: int | None = None,
    side_by_side: int | None = None,
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
        control: whether to train the controls of each network as well, or the "mildest" one of each mechanism. They
            tell whether a gain comes from reading other layers.
        equal_time: whether networks are trained for as many epochs as fit into the time in which the slowest one trains
            the epochs of the recipe. The epochs are measured once and recorded, so that a resumed comparison has them.
        resume: whether to resume the comparison that is in the folder. Networks can be added to it, such as controls.
        together: the number of runs that share the GPU at a time; if None, four classifiers, and one of everything
            else.
        side_by_side: the number of runs that train at a time, each in a process of its own, instead of ``together``.
            It is faster where the processor limits a run, as it does a detector.
        stop: called after every step; if it returns True, checkpoints are saved and `Stopped` is raised.
        show: called with the progress of the runs.
        on_start: called on rank 0 with what each run understood, before its first step.
        command: the command that reproduces this comparison, for the record.
    """
    names = networks_of(models, control=control, attach_options=recipe.attach_options, task=recipe.task)
    _check_names(names)
    if not seeds or len(set(seeds)) != len(seeds):
        raise TrainingError(f"seeds must be different numbers, got {list(seeds)}")
    processes = init_processes(recipe)
    folder = processes.broadcast(folder)
    data = open_data(recipe)
    number = _at_a_time(together, side_by_side, recipe, processes)
    wanted = ComparisonRecord(
        names, list(seeds), together, command, control, equal_time=equal_time, side_by_side=side_by_side
    )
    record = _record(folder, wanted, resume=resume)
    for name in names:  # before anything is measured, so that unknown names and unsuitable networks fail early
        check_start(recipe_for(recipe, name, seeds[0]))
    record = replace(record, shared=max(record.shared, min(number, len(names) * len(seeds))))
    measuring = _Measuring(record, recipe, data, processes, folder, stop=stop, show=show)

    def write(record: ComparisonRecord) -> None:
        make_folder(folder)
        if processes.is_main and (resume or not (folder / RECORD_FILE).exists()):
            write_record(folder, recipe, record)

    try:
        record = measuring.run(names)
    except Stopped:
        write(measuring.record)
        raise
    write(record)

    def run_recipe(name: str, seed: int) -> Recipe:
        return recipe_for(recipe, name, seed, record.epochs.get(name))

    unfinished = []
    for seed in seeds:  # a comparison that is stopped has pairs of the first seeds
        for name in names:
            path, own = run_folder(folder, name, seed), run_recipe(name, seed)
            if resume and (path / "summary.json").exists():
                check_same_recipe(path, own)
                show(Progress(path, "done", own.epochs, own.epochs, 0, 0))
            else:
                unfinished.append((path, own))
    runs: Generator[Progress, None, None]
    if side_by_side is not None:
        runs = train_side_by_side(unfinished, number, resume=resume, stop=stop, on_start=on_start, command=command)
    else:
        trainers = (
            Trainer(
                own, path, resume=resume, data=data, processes=processes, stop=stop, show=show, on_start=on_start,
                command=command, separate_random_state=number > 1,
            )
            for path, own in unfinished
        )  # fmt: skip
        runs = in_turns(trainers, number, lambda: processes.any(stop()))
    for progress in runs:
        try:
            show(progress)
        except BaseException as error:  # a second Ctrl-C among them
            runs.throw(error)
    notes = [*data.notes, *(_plain_controls(names, recipe) if record.control else ())]
    asked = replace(record, models=names, seeds=list(seeds), command=command)
    comparison = read_comparison(folder, recipe=recipe, record=asked, notes=notes)
    if processes.is_main:
        write_json(folder / "comparison.json", as_json(comparison))
    return comparison


def _record(folder: Path, wanted: ComparisonRecord, *, resume: bool) -> ComparisonRecord:
    """Returns the wanted record, or that of the comparison that is resumed, with networks that it did not have yet."""
    if not resume or not (folder / RECORD_FILE).exists():
        return wanted
    known = read_record(folder)
    if wanted.equal_time and not known.equal_time:
        raise TrainingError(
            f"{folder} was started without --equal-time, so its runs have the epochs of the recipe: choose another "
            f"folder"
        )
    names = wanted.models
    models = names if set(known.models) <= set(names) else dict.fromkeys([*known.models, *names])
    seeds = sorted({*known.seeds, *wanted.seeds})
    chosen = known if wanted.together is None and wanted.side_by_side is None else wanted
    return replace(
        known, models=list(models), seeds=seeds, control=wanted.control or known.control, together=chosen.together,
        side_by_side=chosen.side_by_side,
    )  # fmt: skip


class _Measuring:
    """Measures what the networks of a comparison cost, before its first run.

    What the record has already stays as it is, so that a resumed comparison goes on with the same epochs.

    Attributes:
        record: the record with all that has been measured so far.
    """

    def __init__(
        self,
        record: ComparisonRecord,
        recipe: Recipe,
        data: Data,
        processes: Processes,
        folder: Path,
        *,
        stop: Callable[[], bool],
        show: Callable[[Progress], None],
    ) -> None:
        self.record, self.recipe, self.data, self.processes, self.folder = record, recipe, data, processes, folder
        self.stop, self.show = stop, show

    def run(self, names: Sequence[str]) -> ComparisonRecord:
        """Returns the record with the cost of each network, its time if it is needed, and the epochs of equal times.

        Raises:
            Stopped: a stop is requested, which is asked before each network.
        """
        record = self.record
        for name in names:
            if name not in record.costs:
                recipe = self._next("measuring", name)
                cost = static_cost(recipe, self.data.classes, self.processes)._asdict()
                self.record = record = replace(record, costs={**record.costs, name: cost})
        if record.shared == 1 and not record.equal_time:
            return record
        for name in names:
            if name not in record.epoch_seconds:
                seconds = measured_epoch_seconds(self._next("timing", name), self.data, self.processes)
                self.record = record = replace(record, epoch_seconds={**record.epoch_seconds, name: seconds})
        if record.equal_time:
            epochs = equal_time_epochs(self.recipe.epochs, record.epoch_seconds, record.epochs)
            self.record = record = replace(record, epochs=epochs)
        return record

    def _next(self, what: str, name: str) -> Recipe:
        """Returns the recipe of the next network to be measured."""
        if self.processes.any(self.stop()):
            raise Stopped(f"stopped before {what} {name}")
        self.show(Progress(self.folder, f"{what} {name}", 0, self.recipe.epochs, 0, 0))
        return recipe_for(self.recipe, name, self.record.seeds[0])


def _check_names(names: Sequence[str]) -> None:
    """Raises if a name is not known, before any network is measured, which can take minutes."""
    for name in names:
        try:
            check_network(name)
        except ModelError as error:
            raise TrainingError(str(error)) from error


def _plain_controls(names: Sequence[str], recipe: Recipe) -> list[str]:
    """Returns a note for each network with mechanisms whose only control is the plain network."""
    controls = {network.name for found in controls_among(names, recipe).values() for network in found}
    return [
        f"{name}: the plain network is its control, because it reads no other layer"
        for name in names
        if name not in controls and plain_name(name) != name and not control_networks(name, recipe.attach_options)
    ]


def _at_a_time(together: int | None, side_by_side: int | None, recipe: Recipe, processes: Processes) -> int:
    """Returns the number of runs that train at a time. Several runs need a single process."""
    alone = processes.world_size == 1
    if side_by_side is not None:
        if side_by_side < 1:
            raise TrainingError(f"expected side_by_side of at least 1, got {side_by_side}")
        if together is not None:
            raise TrainingError("--together lets runs alternate, and --side-by-side does not: give one of them")
        if not alone:
            raise TrainingError(f"--side-by-side {side_by_side} starts processes itself: run it without torchrun")
        return side_by_side
    possible = alone and recipe.precision != "float16"
    if together is None:
        # A detector waits for the processor at every step, so that several in turns are no faster than one by one.
        useful = processes.device.type == "cuda" and task_class(recipe.task).annotations == "labels"
        return TOGETHER if possible and useful else 1
    if together > 1 and not possible:
        raise TrainingError(f"--together {together} needs one process and a precision other than float16")
    return together
