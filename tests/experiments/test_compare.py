"""Comparison of networks: paired runs, alternating runs, and the files that are written."""

import json

import pytest
import torch
from run_folders import assert_same_run

import interlayer
from interlayer.experiments import TrainedNetwork, compare, comparison_rows, evaluate, networks_of, read_run
from interlayer.experiments.turns import in_turns
from interlayer.training import Stopped, TrainingError
from interlayer.training.data import open_data
from interlayer.training.summary import read_contribution, read_summary

LIGHT = "preresnet20_cifar+mrla_light"


def test_one_network_is_compared_with_its_backbone():
    assert networks_of([LIGHT]) == ["preresnet20_cifar", LIGHT]
    assert networks_of(["resnet50_mrla_base"]) == ["resnet50", "resnet50_mrla_base"]
    assert networks_of(["a", "b", "a"]) == ["a", "b"]
    with pytest.raises(TrainingError, match=r"name two networks, or one with a mechanism such as resnet18\+mrla_light"):
        networks_of(["resnet18"])


def test_runs_of_one_seed_see_the_same_batches_whatever_the_network(small, tmp_path):
    """Otherwise differences would not be paired: the first loss must differ only because of the network."""
    from interlayer.experiments.compare import recipe_for
    from interlayer.training.processes import init_processes
    from interlayer.training.setup import set_up

    recipe = small(attach_options={"channels_per_head": 8}, erasing=0.5, mixup=0.8)
    seen = []
    for model in ("preresnet20_cifar", LIGHT):
        batches = set_up(recipe_for(recipe, model, 3), init_processes(recipe), None).batches
        batches.seed(0, 0)
        seen.append(batches.transform_batch(next(batches.epoch(0))))
    assert (seen[0][0] == seen[1][0]).all()
    assert (seen[0][1] == seen[1][1]).all()


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    from digit_images import SMALL

    from interlayer.training.recipe import from_values

    folder = tmp_path_factory.mktemp("comparison")
    recipe = from_values({**SMALL, "attach_options": {"channels_per_head": 8}, "batch_size": 128, "lr": 0.1})
    return compare(recipe, [LIGHT], folder, seeds=[0, 1], command="interlayer compare")


def test_a_comparison_holds_what_it_says(comparison):
    plain, light = comparison.results
    assert plain.cost.parameters < light.cost.parameters
    assert plain.cost.flops < light.cost.flops
    assert plain.cost.memory < light.cost.memory
    assert light.difference.mean == pytest.approx(light.mean - plain.mean)
    written = json.loads((comparison.folder / "comparison.json").read_text())
    assert [model["model"] for model in written["models"]] == ["preresnet20_cifar", LIGHT]
    assert written["verdicts"] == comparison.verdicts()
    assert plain.contribution is None
    assert light.contribution.images == 2 * 360
    assert light.contribution.value == pytest.approx(light.mean)
    assert comparison.verdicts()[1] == f"{LIGHT}: {light.contribution.sentence}."
    assert "switched off, " in comparison.verdicts()[1]
    assert written["models"][1]["contribution"]["changed"] == light.contribution.changed
    assert written["metric"] == "accuracy"
    assert [model["accuracies"] for model in written["models"]] == [plain.values, light.values]
    assert [model["values"] for model in written["models"]] == [plain.values, light.values]
    rows = comparison_rows(comparison)
    assert rows[0][0] == f"{plain.mean:.2%} ± {plain.spread * 100:.2f}"
    assert rows[0][1] == ""


def test_the_verdict_says_that_a_mechanism_is_not_used(comparison, tmp_path):
    """A mechanism that starts as the identity and hardly learns must not pass for the reason of a difference."""
    recipe = comparison.recipe.replace(lr=1e-6, epochs=1, attach_options={"channels_per_head": 8, "init": "identity"})
    unused = compare(recipe, [LIGHT], tmp_path, seeds=[0])
    assert unused.verdicts()[-1] == (
        f"{LIGHT}: switched off, 0 of 360 predictions change: the network does not use it."
    )


def test_the_contribution_of_a_run_is_that_of_its_weights(comparison):
    """The summary, the evaluation of the run and `interlayer.contribution` on the same images agree."""
    folder = comparison.results[1].folders[0]
    trained = TrainedNetwork(folder)
    stored = read_contribution(read_summary(folder))
    evaluated = evaluate(trained)["contribution"]
    images = open_data(trained.recipe).test
    transform = trained.transform.evaluation()
    pixels = torch.stack([torch.as_tensor(transform(images.open(i))) for i in range(len(images))])
    labels = read_run(folder).records["predictions"][:, 1]
    measured = interlayer.contribution(trained.network, trained.batch_transform.normalize(pixels), labels)
    assert stored.changed == evaluated["changed"] == measured.changed
    assert stored.value_without == evaluated["value_without"] == pytest.approx(measured.value_without)
    assert [row["ratio"] for row in evaluated["blocks"]] == pytest.approx([row.ratio for row in stored.blocks])
    first = interlayer.contribution(trained.network, trained.batch_transform.normalize(pixels[:360]))
    assert [row.ratio for row in stored.blocks] == pytest.approx([row.ratio for row in first.blocks], rel=1e-3)


def test_turns_give_the_results_of_one_after_the_other(comparison, tmp_path):
    """Alternating runs with dropout and stochastic depth must not share random numbers."""
    recipe = comparison.recipe.replace(drop_rate=0.3, attach_options={"channels_per_head": 8, "drop_path": 0.3})
    alone, turns = (compare(recipe, [LIGHT], tmp_path / str(n), seeds=[0, 1], together=n) for n in (1, 2))
    for first, second in zip(alone.results, turns.results, strict=True):
        for a, b in zip(first.folders, second.folders, strict=True):
            assert_same_run(a, b)


def test_a_comparison_of_another_recipe_is_refused(comparison):
    with pytest.raises(TrainingError, match=r"another recipe \(lr 0\.1 -> 0\.5\)"):
        compare(comparison.recipe.replace(lr=0.5), [LIGHT], comparison.folder, seeds=[0, 1], resume=True)


def test_every_run_of_a_stopped_comparison_has_a_checkpoint(comparison, tmp_path):
    count = iter(range(10**9))
    with pytest.raises(Stopped):
        compare(comparison.recipe, [LIGHT], tmp_path, seeds=[0, 1], together=2, stop=lambda: next(count) > 8)
    assert len({path.parent.parent for path in tmp_path.glob("*/*/checkpoints/step_*")}) == 2


def test_a_stopped_comparison_goes_on(comparison, tmp_path):
    count = iter(range(10**9))
    with pytest.raises(Stopped):
        compare(comparison.recipe, [LIGHT], tmp_path, seeds=[0, 1], stop=lambda: next(count) > 30)
    finished = list(tmp_path.glob("*/*/summary.json"))
    times = {path: path.stat().st_mtime_ns for path in finished}
    again = compare(comparison.recipe, [LIGHT], tmp_path, seeds=[0, 1], resume=True)
    assert [r.values for r in again.results] == [r.values for r in comparison.results]
    assert times
    assert {path: path.stat().st_mtime_ns for path in finished} == times, "finished runs are not run again"


def test_every_trainer_is_closed_when_one_fails(small, tmp_path):
    from interlayer.training import Trainer

    trainers = [Trainer(small(), tmp_path / "a"), Trainer(small(lr=1e30, schedule="constant"), tmp_path / "b")]
    with pytest.raises(TrainingError, match="not finite"):
        list(in_turns(iter(trainers), 2))
    for trainer in trainers:
        assert trainer.folder.lock.file.closed


def test_an_unknown_network_is_found_before_anything_trains(small, tmp_path):
    with pytest.raises(TrainingError, match="unknown model 'resnet5'"):
        compare(small(), ["preresnet20_cifar", "resnet5"], tmp_path / "c")
    assert not (tmp_path / "c").exists()
