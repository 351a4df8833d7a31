"""The recipes of detection and segmentation: their learning rates by step, and the values that the papers give."""

import pytest
import torch

from interlayer.training import load_recipe
from interlayer.training.optimization import make_scheduler
from interlayer.training.recipe import RecipeError


def learning_rates(recipe, steps, wanted):
    """The learning rate at some steps of a run whose epochs have this many steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=recipe.scaled_lr)
    scheduler = make_scheduler(recipe, optimizer, steps)
    found = []
    for step in wanted:
        scheduler.step(step // steps)
        scheduler.step_update(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_halonet_warms_up_at_a_fixed_rate_and_decays_at_60_and_65_thousand_steps():
    recipe = load_recipe("halonet_mask_rcnn")
    assert recipe.epochs * recipe.epoch_steps == 67_500
    assert (recipe.image_size, recipe.batch_size, recipe.weight_decay, recipe.scale_jitter) == (
        1024, 64, 4e-5, [4 / 5, 5 / 4]
    )  # fmt: skip
    found = learning_rates(recipe, 2500, [0, 499, 500, 59_999, 60_000, 64_999, 65_000, 67_499])
    assert found == pytest.approx([2 / 300, 2 / 300, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


@pytest.mark.parametrize(
    ("name", "lr", "batch"),
    [
        ("mrla_detection", 0.02, 16),
        ("mrla_mask_rcnn", 0.02, 16),
        ("mrla_retinanet", 0.01, 16),
        ("rla_detection", 0.01, 8),
    ],
)
def test_the_1x_schedule_decays_after_8_and_11_epochs(name, lr, batch):
    recipe = load_recipe(name)
    assert (recipe.epochs, recipe.batch_size, recipe.weight_decay) == (12, batch, 1e-4)
    assert (recipe.freeze_stages, recipe.frozen_norms, recipe.shorter_side) == (1, "statistics", [800, 800])
    found = learning_rates(recipe, 1000, [0, 250, 500, 7999, 8000, 10_999, 11_000])
    expected = [lr * rate for rate in (0.001, 0.001 + 0.999 * 0.5, 1, 1, 0.1, 0.1, 0.01)]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("name", "total"), [("upernet_40k", 40_000), ("upernet_160k", 160_000)])
def test_upernet_decays_polynomially_over_its_steps(name, total):
    recipe = load_recipe(name)
    assert recipe.epochs * recipe.epoch_steps == total
    assert (recipe.optimizer, recipe.weight_decay, recipe.batch_size) == ("adamw", 0.01, 16)
    found = learning_rates(recipe, recipe.epoch_steps, [0, 1500, total // 2, total - 1])
    assert found == pytest.approx([0, 6e-5 * (1 - 1500 / total), 3e-5, 6e-5 / total], rel=1e-3)


def test_cb_and_rest_use_adamw():
    for name in ("cb_detection", "rest_retinanet"):
        recipe = load_recipe(name)
        assert (recipe.optimizer, recipe.scaled_lr, recipe.weight_decay) == ("adamw", 1e-4, 0.05)
    assert load_recipe("cb_detection", ["batch_size=32"]).scaled_lr == 2e-4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["crop=resized"], "task=detect takes crop=none .* start from --recipe finetune_detection"),
        (["crop=scaled"], "crop=scaled needs image_size"),
        (["mixup=0.2"], "task=detect does not support mixup"),
        (["detector=mask_rcnn"], "task=detect takes detector=faster_rcnn or retinanet, not mask_rcnn"),
        (["task=segment", "detector=retinanet"], "takes a segmenter"),
        (["shorter_side=[800,2000]"], "is more than longer_side=1333"),
        (["schedule_on=epoch"], "warmup_steps=100 needs schedule_on=step"),
        (["task=classification", "crop=none", "vertical_flip=0.5"], "vertical_flip is for tasks with boxes or masks"),
        (["task=classification", "crop=jittered"], "crop=jittered is for tasks with boxes or masks"),
    ],
)
def test_values_that_a_task_does_not_support_are_one_sentence(overrides, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe("finetune_detection", overrides)
