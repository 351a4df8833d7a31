"""Tasks: what is built and learned, by the name that a recipe gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .classification import Classification
from .evaluator import Collective, Evaluator, MeanEvaluator, Scores
from .metric import Metric
from .show import FinishedRun, ImageSource, Picture, Section, Span, Table
from .task import Task, TaskError

TASKS: dict[str, type[Task]] = {Classification.name: Classification}


def register_task(task: type[Task]) -> type[Task]:
    """Makes a task known by its name; a class decorator."""
    TASKS[task.name] = task
    return task


def task_class(name: str) -> type[Task]:
    """Returns the class of the task of this name."""
    if name not in TASKS:
        raise TaskError(f"unknown task {name!r}; the tasks are: {', '.join(sorted(TASKS))}")
    return TASKS[name]


def make_task(values: Mapping[str, Any], classes: Sequence[str]) -> Task:
    """Makes the task that the values of a recipe name, for data of these classes."""
    return task_class(values.get("task", Classification.name))(values, classes)


__all__ = [
    "TASKS",
    "Classification",
    "Collective",
    "Evaluator",
    "FinishedRun",
    "ImageSource",
    "MeanEvaluator",
    "Metric",
    "Picture",
    "Scores",
    "Section",
    "Span",
    "Table",
    "Task",
    "TaskError",
    "make_task",
    "register_task",
    "task_class",
]
