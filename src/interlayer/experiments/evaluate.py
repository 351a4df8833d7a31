"""Evaluation of a trained network on a set of labeled images."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..analysis import TaskContribution, task_contribution
from ..tasks import Scores
from ..training import Progress, Recipe, TrainingError
from ..training.data import Data, EvalBatches, Images, LoadingContext, Problems, Ranks, eval_batches, open_data
from ..training.data.folders import FolderImages
from ..training.evaluation import evaluate_batches
from .trained import TrainedNetwork

SHOWN_BATCH = 64  # number of images per step of the progress bar
SPLIT_FOLDERS = ("train", "val", "validation", "valid", "test", "cifar-10-batches-py", "cifar-100-python")
logger = logging.getLogger(__name__)


def evaluate(
    trained: TrainedNetwork, data: str | None = None, *, show: Callable[[Progress], None] = lambda progress: None
) -> dict[str, Any]:
    """Evaluates a network on the test images of the run's data, or of ``data`` if given.

    Returns:
        The metrics of the task, the loss, the details of the task and the contribution of the network's mechanisms, as
        JSON-serializable values.
    """
    task, classes = trained.task, trained.task.classes
    num_classes = len(classes) or trained.recipe.num_classes
    recipe = trained.recipe.replace(data=data or trained.recipe.data, num_classes=num_classes, validation=0)
    opened = _unsplit_folder(recipe, classes) or open_data(recipe)
    for note in opened.notes:
        logger.warning(note)
    test_classes = list(opened.test.classes)
    if classes and isinstance(opened.test, Images) and test_classes != classes[: len(test_classes)]:
        found, known = ", ".join(test_classes[:5]), ", ".join(classes[:5])
        raise TrainingError(f"{recipe.data} has other classes than the run: {found}, ... instead of {known}, ...")
    context = LoadingContext(recipe, task, trained.transform, Ranks(), trained.device, opened.problems)
    measured = task_contribution(task, trained.network)
    scores = _scores(trained, eval_batches(opened.test, context), show, measured)
    return {
        "model": trained.recipe.model,
        "data": recipe.data,
        "images": scores.count,
        **{metric.name: scores.metrics[metric.name] for metric in task.eval_metrics},
        "loss": scores.metrics["loss"],
        **task.details(scores),
        "contribution": None if measured is None else measured.result(scores).as_dict(),
        "bad_images": opened.problems.found,
    }


def _scores(
    trained: TrainedNetwork,
    batches: EvalBatches,
    show: Callable[[Progress], None],
    contribution: TaskContribution | None,
) -> Scores:
    scores = None
    steps = math.ceil(batches.count / SHOWN_BATCH)
    normalize = trained.batch_transform.normalize
    evaluation = evaluate_batches(
        trained.task, trained.network, batches, normalize=normalize, records=True, contribution=contribution
    )
    for done, scores in enumerate(evaluation):  # noqa: B007  the scores come last
        show(Progress(Path("evaluating"), "evaluating", 0, 1, done, steps))
    assert scores is not None, "evaluate_batches yields the scores last"
    return scores


def _unsplit_folder(recipe: Recipe, classes: list[str]) -> Data | None:
    """Opens a folder of class folders without splits, to evaluate all of its images. Returns None for other data."""
    path = Path(recipe.data)
    if not path.is_dir() or any((path / name).is_dir() for name in SPLIT_FOLDERS):
        return None
    problems = Problems(recipe.on_bad_image)
    images = FolderImages(path, classes or None, problems)
    return Data(images, None, images, list(images.classes), problems)
