"""Robustness of networks: conditions and repetitions, agreement with `evaluate`, tasks other than classification."""

import dataclasses
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from interlayer.analysis.robustness import PERTURBATIONS
from interlayer.experiments import evaluate, load_network, robustness, robustness_table, strength_sources
from interlayer.experiments.robustness import Condition, PerturbedEvaluation
from interlayer.training import TrainingError

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))
FEW = [
    PERTURBATIONS[name].with_strengths(strengths)
    for name, strengths in (("occlusion", [0.5]), ("gaussian_noise", [60]), ("fgsm", [8]), ("pgd", [8]))
]


@pytest.fixture(scope="module")
def network(finished_run):
    return load_network(str(finished_run))


@pytest.fixture(scope="module")
def result(network):
    """The same network twice: all differences are zero."""
    shown = []
    found = robustness(
        {"first": network, "second": network}, perturbations=FEW, repeats=3, images=80, show=shown.append
    )
    return found, shown


def test_what_is_random_is_repeated_and_what_is_not_is_run_once(result):
    found, _ = result
    counts = {condition.title: len(score.values) for condition, score in found.scores["first"].items()}
    assert counts == {"none": 1, "center occlusion, black": 1, "Gaussian noise": 3, "FGSM": 1, "PGD, 10 steps": 3}
    for score in found.scores["first"].values():
        assert (score.half_width is None) == (len(score.values) == 1)
        assert score.mean == pytest.approx(sum(score.values) / len(score.values))
    noise = found.scores["first"][Condition(FEW[1], 60.0)]
    assert len(set(noise.values)) > 1, "every repetition has noise of its own"
    deviation = torch.tensor(noise.values, dtype=torch.float64).std()
    assert noise.half_width == pytest.approx(4.302653 * float(deviation) / math.sqrt(3), rel=1e-5)  # Student's t, n = 3


def test_networks_see_the_same_noise(result):
    found, _ = result
    assert found.scores["first"] == found.scores["second"]


def test_progress_reaches_its_end_for_each_network(result):
    _, shown = result
    total = 80 * (1 + 1 + 3 + 1 + 3)
    assert {progress.steps for progress in shown} == {total}
    done = [progress for progress in shown if progress.what == "done"]
    assert [progress.folder.name for progress in done] == ["first", "second"]
    last = shown[shown.index(done[0]) - 1]
    assert (last.step, last.what) == (total, "measuring PGD, 10 steps epsilon 8/255")


def test_without_perturbation_it_is_an_evaluation(network):
    found = robustness({"a": network}, perturbations=[])
    expected = evaluate(network)
    assert found.images == expected["images"] == 360
    assert found.scores["a"][Condition()].mean == expected["accuracy"]


def test_the_seed_decides_and_the_batch_does_not(network, finished_run):
    noise = [PERTURBATIONS["shot_noise"].with_strengths([2])]
    first = robustness({"a": network}, perturbations=noise, repeats=2, images=60)
    small = load_network(str(finished_run), ["eval_batch_size=7", "resident=no"])
    assert robustness({"a": small}, perturbations=noise, repeats=2, images=60).scores == first.scores
    other = robustness({"a": network}, perturbations=noise, repeats=2, images=60, seed=1)
    assert other.scores["a"][Condition(noise[0], 2.0)] != first.scores["a"][Condition(noise[0], 2.0)]


def test_fgsm_is_that_of_a_plain_loop(network):
    """In pixels from 0 to 1, with the network's mean and standard deviation inside."""
    found = robustness({"a": network}, perturbations=[PERTURBATIONS["fgsm"].with_strengths([8])])
    from interlayer.experiments import open_test_images

    source = open_test_images(network)
    transform = network.transform.evaluation()
    bytes_ = torch.stack([torch.as_tensor(transform(source.open(i))) for i in range(len(source))])
    labels = torch.as_tensor(source.labels)
    mean, std = (torch.tensor(getattr(network.transform, name)).view(3, 1, 1) for name in ("mean", "std"))
    pixels = (bytes_.float() / 255).requires_grad_()
    F.cross_entropy(network.network((pixels - mean) / std), labels).backward()
    attacked = (pixels + 8 / 255 * pixels.grad.sign()).clamp(0, 1)
    right = network.network((attacked - mean) / std).argmax(dim=1) == labels
    network.network.zero_grad()
    assert found.scores["a"][found.conditions[1]].mean == pytest.approx(float(right.float().mean()), abs=1.5 / 360)
    assert right.float().mean() < found.scores["a"][Condition()].mean


def test_the_network_is_left_as_it_was(network):
    before = {name: tensor.clone() for name, tensor in network.network.state_dict().items()}
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in network.network.modules())
    robustness({"a": network}, perturbations=FEW[2:], repeats=1, images=10)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.network.parameters())
    assert not network.network.training
    modules = list(network.network.modules())
    assert sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules) == hooks


def test_the_table_has_networks_side_by_side(result):
    found, _ = result
    table = robustness_table(found)
    assert table.columns == ["perturbation", "strength", "runs", "first", "second", "difference"]
    assert [row[:3] for row in table.rows] == [
        ["none", "", "1"],
        ["center occlusion, black", "0.5 of the side", "1"],
        ["Gaussian noise", "sigma 60/255", "3"],
        ["FGSM", "epsilon 8/255", "1"],
        ["PGD, 10 steps", "epsilon 8/255", "3"],
    ]
    assert table.rows[0][5] == "+0.00"
    assert table.rows[2][5] == "+0.00 (+0.00 to +0.00)"
    assert "±" in table.rows[2][3]
    assert "±" not in table.rows[3][3]
    assert "run 3 times" in table.note
    assert "what is not random is run once" in table.note
    assert "difference to first, in points" in table.note
    assert strength_sources(found)[0] == "center occlusion, black: CB, Table 8"
    assert strength_sources(found)[2] == "FGSM: given by the user"


def test_the_record_is_json(result):
    import json

    found, _ = result
    record = json.loads(json.dumps(found.as_dict()))
    assert record["networks"] == ["first", "second"]
    assert record["results"][0]["perturbation"] is None
    noise = record["results"][2]
    assert (noise["perturbation"], noise["strength"], noise["random"]) == ("gaussian_noise", 60.0, True)
    assert len(noise["scores"]["second"]["values"]) == 3
    assert record["results"][3]["scores"]["first"]["half_width"] is None


def test_examples_are_of_the_first_image_under_every_condition(result):
    found, _ = result
    assert [example.condition for example in found.examples] == found.conditions
    plain = found.examples[0]
    assert torch.equal(plain.image, plain.original)
    assert found.examples[1].image[:, 2:6, 2:6].sum() == 0
    change = found.examples[3].image - plain.original
    assert change.abs().max() == pytest.approx(8 / 255, abs=1e-5)


# Tasks other than classification


class Batches(list):
    """Batches of images in memory."""

    @property
    def count(self):
        return sum(int((places >= 0).sum()) for _, _, places in self)


def in_memory(task_network, mean=(0.0, 0.0, 0.0)):
    """What an evaluation needs of a loaded network, without normalization."""
    return SimpleNamespace(
        network=task_network.eval(),
        batch_transform=SimpleNamespace(normalize=lambda pixels: pixels.float() / 255),
        transform=SimpleNamespace(mean=mean),
        device=torch.device("cpu"),
    )


def bright_or_dark():
    """A 1 x 1 convolution that says whether a pixel is brighter than a half: class 1."""
    network = nn.Conv2d(3, 2, 1)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([-1.0, 1.0])[:, None, None, None].expand(2, 3, 1, 1))
        network.bias.copy_(torch.tensor([1.5, -1.5]))
    return network


def test_dense_prediction_with_padded_images_of_different_sizes():
    from pixel_labels import PixelLabels

    task = PixelLabels({}, ["dark", "bright"])
    pixels = torch.zeros(3, 3, 8, 12, dtype=torch.uint8)
    pixels[0, :, :4, :8], pixels[1] = 160, 160
    targets = [
        ((4, 8), torch.ones(4, 8).long()),
        ((8, 12), torch.ones(8, 12).long()),
        ((2, 2), torch.ones(2, 2).long()),
    ]
    batches = Batches([(pixels, targets, torch.tensor([0, 1, -1]))])  # the last image is padding
    rows = {
        name: PERTURBATIONS[name].with_strengths([strength])
        for name, strength in (("occlusion", 0.5), ("gaussian_noise", 100), ("fgsm", 20), ("pgd", 40))
    }
    conditions = [
        Condition(),
        *(Condition(row, row.strengths[0]) for row in rows.values()),
        Condition(rows["fgsm"], 60),
    ]
    evaluation = PerturbedEvaluation(in_memory(bright_or_dark()), task, conditions, repeats=2, seed=0)
    assert [done for done, _ in evaluation.run(batches)] == [2 * i for i in range(1, 9)]
    scores = [[each.metrics["pixel_accuracy"] for each in found] for found in evaluation.results().values()]
    clean, occluded, noisy, weak, projected, strong = scores
    assert clean == [1.0]
    assert occluded == [0.75]  # a quarter of each image, in its own center, is black
    assert len(noisy) == 2
    assert all(0.5 < value < 0.95 for value in noisy)  # 160 with a standard deviation of 100
    assert weak == [1.0]  # 160 - 20 is above a half
    assert strong == [0.0]  # 160 - 60 is below
    assert projected == [0.0, 0.0]
    assert all(found[0].count == 2 for found in evaluation.results().values())


def test_regression_is_attacked_through_the_loss_of_its_evaluator():
    from digit_value import DigitValue

    task = DigitValue({}, [])
    network = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1))
    with torch.no_grad():
        network[2].weight.fill_(1.0)
        network[2].bias.fill_(0.0)  # the sum of the mean channels
    batches = Batches([(torch.full((2, 3, 4, 4), 51, dtype=torch.uint8), torch.tensor([0.5, 0.7]), torch.arange(2))])
    condition = Condition(PERTURBATIONS["fgsm"], 51.0)
    evaluation = PerturbedEvaluation(in_memory(network), task, [Condition(), condition], repeats=1, seed=0)
    list(evaluation.run(batches))
    clean, attacked = (found[0].metrics["error"] for found in evaluation.results().values())
    assert clean == pytest.approx(0.1)  # the prediction is 3 x 0.2
    assert attacked == pytest.approx(0.7)  # each value moves by 0.2 away from its target


def test_attacks_of_several_right_labels_raise_the_loss_of_all_of_them(network):
    logits = torch.randn(2, 10, requires_grad=True)
    right = torch.tensor([[3, 5], [1, -1]])
    loss = network.task.evaluation_loss(logits, right)
    probabilities = logits.softmax(dim=1)
    expected = -(probabilities[0, 3] + probabilities[0, 5]).log() - probabilities[1, 1].log()
    torch.testing.assert_close(loss, expected)


def test_predictions_that_are_restricted_to_some_classes_are_attacked(network):
    """The other logits are minus infinity, and the gradient is finite."""
    task = network.task.restricted_to([0, 1, 2])
    pixels = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    batches = Batches([(pixels, torch.tensor([0, 1, 2, 0, 1, 2]), torch.arange(6))])
    evaluation = PerturbedEvaluation(network, task, [Condition(PERTURBATIONS["fgsm"], 8.0)], repeats=1, seed=0)
    list(evaluation.run(batches))
    assert evaluation.examples[0].image.isfinite().all()
    assert not torch.equal(evaluation.examples[0].image, evaluation.examples[0].original)


# What does not go


def test_networks_of_different_data_or_tasks_are_refused(network):
    other = SimpleNamespace(task=network.task, recipe=network.recipe.replace(data="synthetic"), device=network.device)
    with pytest.raises(TrainingError, match="the runs have different data, digits and synthetic: give --data"):
        robustness({"a": network, "b": other})
    other = SimpleNamespace(task=SimpleNamespace(name="segment"), recipe=network.recipe)
    with pytest.raises(TrainingError, match="different tasks, classification and segment"):
        robustness({"a": network, "b": other})
    with pytest.raises(TrainingError, match="at least one network"):
        robustness({})
    with pytest.raises(TrainingError, match="repeats of at least 1, got 0"):
        robustness({"a": network}, repeats=0)


def test_a_task_that_has_no_loss_of_predictions_is_not_attacked(network, monkeypatch):
    monkeypatch.setattr(type(network.task), "why_not_attacked", "its predictions are boxes")
    message = "task=classification cannot be attacked, its predictions are boxes: leave fgsm and pgd out"
    with pytest.raises(TrainingError, match=message):
        robustness({"a": network}, perturbations=FEW)
    assert robustness({"a": network}, perturbations=FEW[:1], images=10).images == 10


def test_more_images_than_there_are_is_all_of_them(network):
    found = robustness({"a": network}, perturbations=[], images=100_000)
    assert found.images == 360


def test_conditions_are_equal_if_their_strengths_are():
    row = PERTURBATIONS["fgsm"]
    assert Condition(row, 1.0) == Condition(dataclasses.replace(row), 1.0)
    assert Condition(row, 1.0) != Condition(row, 2.0)
