"""Every registered task fulfills the interface."""

import dataclasses
import math

import pytest
import torch

from interlayer.tasks import TASKS, Collective, Metric, TaskError, make_task, task_class
from interlayer.tasks.confusion import MATRIX_CLASSES, confusion_section
from interlayer.training.processes import init_processes
from interlayer.training.recipe import RecipeError
from interlayer.training.setup import set_up
from interlayer.training.step import TrainStep

LABELED = sorted(  # of the package; those with boxes or masks: test_dense_tasks.py
    name for name, task in TASKS.items() if task.annotations == "labels" and task.__module__.startswith("interlayer.")
)


@pytest.mark.parametrize("name", LABELED)
def test_every_task_trains_a_step(small, name):
    recipe = small(task=name, batch_size=32)
    setup = set_up(recipe, init_processes(recipe), None)
    before = [parameter.detach().clone() for parameter in setup.network.parameters()]
    step = TrainStep(setup)
    step.run(next(setup.batches.epoch(0)))
    totals = step.sums.read()
    assert (totals.images, totals.first_bad_step) == (32, -1)
    assert math.isfinite(totals.mean_loss)
    assert set(totals.means) == {metric.name for metric in setup.task.train_metrics}
    assert any(not torch.equal(old, new) for old, new in zip(before, setup.network.parameters(), strict=True))


@pytest.mark.parametrize("name", LABELED)
def test_every_task_evaluates_its_metrics_and_its_headline(small, name):
    recipe = small(task=name, batch_size=32)
    setup = set_up(recipe, init_processes(recipe), None)
    task, evaluator = setup.task, setup.task.evaluator(records=True)
    pixels, targets, places = next(iter(setup.held_out))
    with torch.no_grad():
        outputs = task.forward(setup.network.eval(), setup.batches.batch_transform.normalize(pixels))
    evaluator.update(outputs, targets, torch.where(places > 5, -1, places))  # padding is ignored
    scores = evaluator.result(Collective())
    assert scores.count == 6
    assert set(scores.metrics) == {"loss", *(metric.name for metric in task.eval_metrics)}
    assert task.headline in task.eval_metrics
    assert all(len(rows) == 6 for rows in scores.records.values())


def test_an_unknown_task_is_one_sentence_that_lists_the_tasks(small):
    for ask in (lambda: task_class("clasification"), lambda: make_task({"task": "clasification"}, [])):
        with pytest.raises(TaskError, match=r"unknown task 'clasification'; the tasks are: .*classification"):
            ask()
    with pytest.raises(RecipeError, match=r"unknown task 'clasification'; the tasks are: .*classification"):
        small(task="clasification")


def test_a_task_that_cannot_mix_says_so(small):
    class Unmixable(TASKS["classification"]):
        name = "unmixable"

        def mixable(self, targets):
            return super(TASKS["classification"], self).mixable(targets)

    with pytest.raises(TaskError, match="task=unmixable cannot mix images: set mixup=0 and cutmix=0"):
        Unmixable(dataclasses.asdict(small()), ["a"]).mixable(torch.zeros(1))


def test_a_task_without_classes_says_so(small):
    class Unrestricted(TASKS["classification"]):
        name = "unrestricted"

        def restricted_to(self, labels):
            return super(TASKS["classification"], self).restricted_to(labels)

    with pytest.raises(TaskError, match="task=unrestricted predicts no classes that could be restricted"):
        Unrestricted(dataclasses.asdict(small()), ["a"]).restricted_to([0])


def test_a_metric_is_printed_and_compared_as_it_says():
    accuracy = Metric("accuracy", percent=True, counts_images=True)
    error = Metric("error", higher_is_better=False)
    assert (accuracy.format(0.84031), accuracy.format(0.84031, short=True)) == ("84.03%", "84.0%")
    assert (accuracy.format_difference(0.0051), accuracy.format_spread(0.0051)) == ("+0.51", "0.51")
    assert (error.format(0.12345), error.format_difference(-0.5)) == ("0.1235", "-0.5000")
    assert accuracy.is_better(0.9, than=0.8)
    assert error.is_better(0.8, than=0.9)
    assert not error.is_better(0.8, than=0.8)
    assert (accuracy.resolution(50), error.resolution(50)) == (0.02, 0.0)
    assert (accuracy.unit, error.unit) == ("points", "")
    assert accuracy.format(math.nan) == ""


def records(labels, predicted):
    """The predictions that an evaluation records: index, true class and predicted class of each image."""
    return torch.stack([torch.arange(len(labels)), labels, predicted], 1)


def test_few_classes_give_a_confusion_matrix_and_many_a_list_of_pairs():
    labels, predicted = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([0, 1, 1, 1, 0, 2])
    few = confusion_section(records(labels, predicted), ["cat", "dog", "bird"])
    assert few.matrix.counts == [[1, 2, 0], [0, 1, 0], [1, 0, 1]]
    names = [f"class {i}" for i in range(MATRIX_CLASSES + 1)]
    many = confusion_section(records(labels, predicted), names)
    assert many.matrix is None
    assert many.tables[0].rows == [["class 0", "class 1", "2", "66.7%"], ["class 2", "class 0", "1", "50.0%"]]
    assert "3 of 6 test images" in many.text
    assert "every test image" in confusion_section(records(labels, labels), names).text
    everything = torch.arange(26).repeat_interleave(2)
    longer = confusion_section(records(everything, everything.roll(1)), names)
    assert len(longer.tables[0].rows) == 20
    assert "The 20 most frequent of 26 pairs:" in longer.text
