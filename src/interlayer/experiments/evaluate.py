"""Evaluation of a network on a set of labeled images."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from ..analysis import TaskContribution, task_contribution
from ..tasks import Scores, Task
from ..training import Progress, Recipe, TrainingError
from ..training.data import (
    ClassNames,
    Data,
    EvalBatches,
    LoadingContext,
    Problems,
    Ranks,
    eval_batches,
    open_data,
    open_data_to_evaluate,
)
from ..training.data.image_folders import named_split
from ..training.evaluation import evaluate_batches
from ..training.summary import task_scores
from .trained import LoadedNetwork, task_of

logger = logging.getLogger(__name__)


def evaluate(
    trained: LoadedNetwork,
    data: str | None = None,
    *,
    split: str | None = None,
    labels: str | None = None,
    restrict: bool | None = None,
    skip_option: str = "on_bad_image=skip",
    show: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Evaluates a network on the test images of the run's data, or on ``data`` if given.

    Args:
        trained: the network.
        data: the data, as in a recipe. The class folders of a folder are matched with the classes of the network by
            name. A folder without splits is evaluated as a whole.
        split: train, validation or test; if None, the test split of the run's data, and of another folder its test
            split, or else its validation split, or else its training split.
        labels: "real" for the labels of ImageNet-ReaL, or a JSON file of the same form. The data is then a folder of
            ImageNet's validation images, and any of an image's right labels counts.
        restrict: whether predictions are restricted to the classes that have a folder; if None, they are restricted if
            these are the classes of ImageNet-A or ImageNet-R.
        skip_option: the option that skips images that cannot be used, for the message of an error.
        show: called with the progress.

    Returns:
        The metrics of the task, the loss, the details of the task and the contribution of the network's mechanisms, as
        JSON-serializable values.
    """
    recipe, opened, task = open_to_evaluate(
        trained, data, split=split, labels=labels, restrict=restrict, skip_option=skip_option
    )
    for note in opened.notes:
        logger.warning(note)
    context = LoadingContext(recipe, task, trained.transform, Ranks(), trained.device, opened.problems)
    measured = task_contribution(task, trained.network)
    scores = _scores(trained, task, eval_batches(opened.test, context), show, measured)
    return {
        "model": trained.recipe.model,
        "data": recipe.data,
        **({"labels": labels} if labels else {}),
        "images": scores.count,
        **task_scores(task, scores),
        **task.details(scores),
        "contribution": None if measured is None else measured.result(scores).as_dict(),
        "bad_images": opened.problems.found,
    }


def open_to_evaluate(
    trained: LoadedNetwork,
    data: str | None,
    *,
    split: str | None = None,
    labels: str | None = None,
    restrict: bool | None = None,
    skip_option: str = "on_bad_image=skip",
) -> tuple[Recipe, Data, Task]:
    """Opens the images on which a network is evaluated, as the test split. See `evaluate` for the arguments.

    Returns:
        The recipe with the data, the opened data, and the task with the classes that can be predicted.
    """
    if labels is not None and restrict:
        raise TrainingError(
            f"restrict keeps to the classes that have a folder, and labels={labels} reads no folders: give one of them"
        )
    recipe = _recipe(trained, data)
    opened = _open(trained, recipe, data, named_split(split) if split else None, labels, skip_option)
    return recipe, opened, _restricted(_task(trained, opened), trained, opened, restrict)


def _recipe(trained: LoadedNetwork, data: str | None) -> Recipe:
    """Returns the recipe of the network with the data to evaluate. Options of other kinds of data are dropped."""
    recipe = trained.recipe.replace(num_classes=len(trained.classes) or trained.recipe.num_classes)
    if data is None:
        return recipe
    same_kind = "/" in data and data.split("/")[0] == recipe.data.split("/")[0]
    options = recipe.data_options if same_kind else trained.data_options
    return recipe.replace(data=data, data_options=options, validation=0)


def _open(
    trained: LoadedNetwork,
    recipe: Recipe,
    data: str | None,
    split: str | None,
    labels: str | None,
    skip_option: str,
) -> Data:
    problems = Problems(recipe.on_bad_image, skip_option=skip_option)
    if data is None and not trained.summary:
        raise TrainingError(f"no images to evaluate {trained.recipe.model} on: give --data")
    if data is not None or labels is not None:
        return open_data_to_evaluate(recipe, trained.class_names or ClassNames([]), split, problems, labels=labels)
    opened = open_data(recipe if split else recipe.replace(validation=0), problems)
    if split and getattr(opened, split) is None:
        raise TrainingError(f"{recipe.data} has no {split} split")
    opened.test = getattr(opened, split or "test")
    return opened


def _task(trained: LoadedNetwork, opened: Data) -> Task:
    """Returns the task of the network, with the classes of the data if the network does not know their names."""
    if trained.class_names is not None or not trained.classes:
        return trained.task
    expected, found = len(trained.classes), len(opened.classes)
    if found != expected:
        raise TrainingError(
            f"{trained.recipe.model} has {expected} classes of unknown names, and the data has {found} classes"
        )
    logger.warning("the names of the %d classes are not known: they are those of the data, in their order", found)
    return task_of(trained.recipe, opened.classes)


def _restricted(task: Task, trained: LoadedNetwork, opened: Data, restrict: bool | None) -> Task:
    """Restricts the predictions to the classes of the data, if asked for or if a test set is defined in this way.

    The last note of the data, which says how many classes have a folder, is completed with what is done.
    """
    if opened.labels is None:
        if restrict:
            raise TrainingError(
                "restrict keeps to the classes that have a folder, and the data has no folders that are matched with "
                "classes: leave it out, or give a folder as --data"
            )
        return task
    assert trained.class_names is not None, "only folders that were matched with class names have some of the classes"
    if len(opened.labels) == len(trained.class_names):
        if restrict:
            opened.notes.append("all classes have a folder: there is nothing to restrict")
        return task
    benchmark = trained.class_names.benchmark(opened.labels)
    if restrict or (restrict is None and benchmark):
        of_benchmark = f", those of {benchmark}" if benchmark else ""
        opened.notes[-1] += f"{of_benchmark}: predictions are restricted to them"
        return task.restricted_to(opened.labels)
    opened.notes[-1] += f": predictions are among all {len(trained.class_names):,}, unless restricted by --restrict"
    return task


class _CountedBatches(EvalBatches):
    """Batches that count the images that were read, for the progress bar."""

    def __init__(self, batches: EvalBatches) -> None:
        self.batches, self.count, self.done = batches, batches.count, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for pixels, targets, places in self.batches:
            self.done = min(self.count, self.done + len(places))  # the last batch is padded
            yield pixels, targets, places


def _scores(
    trained: LoadedNetwork,
    task: Task,
    batches: EvalBatches,
    show: Callable[[Progress], None],
    contribution: TaskContribution | None,
) -> Scores:
    scores, counted = None, _CountedBatches(batches)
    normalize = trained.batch_transform.normalize
    evaluation = evaluate_batches(
        task, trained.network, counted, normalize=normalize, records=True, contribution=contribution
    )
    for scores in evaluation:  # noqa: B007  the scores come last
        show(Progress(Path("evaluating"), "evaluating", 0, 1, counted.done, counted.count))
    assert scores is not None, "evaluate_batches yields the scores last"
    return scores
