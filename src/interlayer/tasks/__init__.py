"""Tasks: what a network is trained for. A recipe selects a task by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .classification import Classification
from .detection import Detection, InstanceSegmentation
from .evaluator import Collective, Evaluator, MeanEvaluator, Scores
from .metric import Metric
from .segmentation import Segmentation
from .show import FinishedRun, ImageSource, Line, Matrix, Picture, Plot, Section, Span, Table
from .task import Task, TaskError

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Classification, Detection, InstanceSegmentation, Segmentation)
}


def register_task(task: type[Task]) -> type[Task]:
    """Registers a task under its name. Can be used as a class decorator."""
    TASKS[task.name] = task
    return task


def task_class(name: str) -> type[Task]:
    """Returns the task class with this name."""
    if name not in TASKS:
        raise TaskError(f"unknown task {name!r}; the tasks are: {', '.join(sorted(TASKS))}")
    return TASKS[name]


def make_task(values: Mapping[str, Any], classes: Sequence[str]) -> Task:
    """Creates the task that a recipe selects.

    Args:
        values: the values of the recipe, by key.
        classes: class names of the data, by label.
    """
    return task_class(values.get("task", Classification.name))(values, classes)


__all__ = [
    "TASKS",
    "Classification",
    "Collective",
    "Detection",
    "Evaluator",
    "FinishedRun",
    "ImageSource",
    "InstanceSegmentation",
    "Line",
    "Matrix",
    "MeanEvaluator",
    "Metric",
    "Picture",
    "Plot",
    "Scores",
    "Section",
    "Segmentation",
    "Span",
    "Table",
    "Task",
    "TaskError",
    "make_task",
    "register_task",
    "task_class",
]
