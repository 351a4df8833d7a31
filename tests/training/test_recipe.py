"""Recipes: values are read and checked, and misspelled keys are errors."""

import dataclasses
import re

import pytest
import yaml

from interlayer.training.recipe import (
    Recipe,
    RecipeError,
    differences,
    from_values,
    list_recipes,
    load_recipe,
    read_recipe,
    recipe_text,
)


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_opens_with_the_command_that_runs_it(name):
    head = [line for line in recipe_text(name).splitlines() if line.startswith("#")]
    commands = [line for line in head if re.match(r"# interlayer (train|compare)", line)]
    assert len(commands) == 1
    assert name in commands[0] or name in ("default", "digits")
    load_recipe(name)


@pytest.mark.parametrize("name", list_recipes())
def test_the_resolved_recipe_reads_back_the_same(name, tmp_path):
    recipe = load_recipe(name)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml("some command"))
    assert read_recipe(path) == recipe


def test_every_training_setting_of_the_papers_is_there():
    expected = {"mrla_resnet", "mrla_efficientnet", "mrla_deit", "rla_cifar", "rla_resnet", "rla_mobilenetv2"}
    expected |= {"rla_refined", "halonet_ablation", "halonet_pretrain_21k", "halonet_finetune", "cb_deit"}
    expected |= {"rest_ablation", "mrla_banet", "mrla_mixup", *(f"halonet_h{i}" for i in range(8))}
    assert expected <= set(list_recipes())


def test_an_override_wins_and_keeps_its_type():
    recipe = load_recipe("rla_cifar", ["epochs=7", "lr=1e-3", "milestones=[3,5]", "tensorboard=false", "flip=0"])
    assert (recipe.epochs, recipe.lr, recipe.milestones, recipe.tensorboard, recipe.flip) == (
        7,
        1e-3,
        [3, 5],
        False,
        0.0,
    )
    assert isinstance(recipe.flip, float)


def test_options_are_overridden_one_by_one():
    recipe = load_recipe("mrla_efficientnet", ["optimizer_options.eps=1e-2", "model_options.a.b=3"])
    assert recipe.optimizer_options == {"alpha": 0.9, "eps": 0.01}
    assert recipe.model_options == {"a": {"b": 3}}


def test_attach_options_go_with_the_network_they_were_written_for():
    assert load_recipe("digits").attach_options
    assert load_recipe("digits", model="preresnet20_cifar").attach_options == {}
    assert load_recipe("digits", model="preresnet20_cifar+mrla_base").attach_options == {"channels_per_head": 8}


def test_extends_takes_what_it_does_not_change():
    base, changed = load_recipe("mrla_resnet"), load_recipe("rla_resnet")
    assert set(differences(base, changed)) == {"epochs"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("epoch=3", "did you mean 'epochs'"),
        ("weight_decai=1", "did you mean 'weight_decay'"),
        ("epochs=many", "epochs must be a whole number, got 'many'"),
        ("epochs=1.5", "epochs must be a whole number, got 1.5"),
        ("lr=fast", "lr must be a number"),
        ("tensorboard=maybe", "tensorboard must be true or false"),
        ("precision=float17", "did you mean 'float1"),
        ("task=clasification", "unknown task 'clasification'; the tasks are: .*classification"),
        ("milestones=3", "milestones must be a list"),
        ("flip=2", "flip must be from 0 to 1, got 2"),
        ("epochs=0", "epochs must be at least 1"),
        ("batch_size=10 accumulate=3", None),
        ("crop_scale=[1,0.5]", "crop_scale must be two rising"),
        ("shorter_side=[480,256]", "shorter_side must be two rising"),
        ("schedule=multistep", "needs milestones"),
        ("auto_augment=magic", "not known to timm"),
        ("lr.x=3", "lr holds one value"),
        ("justtext", "expected key=value"),
        ("optimiser_options.x=3", "did you mean 'optimizer_options'"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_remedy(override, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe("default", override.split(" "))


def test_an_unknown_recipe_names_the_nearest(tmp_path):
    with pytest.raises(RecipeError, match="did you mean 'rla_cifar'"):
        load_recipe("rla_cifer")
    with pytest.raises(RecipeError, match="no such recipe file"):
        load_recipe(str(tmp_path / "x.yaml"))
    (tmp_path / "broken.yaml").write_text("a: [1")
    with pytest.raises(RecipeError, match="not valid YAML"):
        load_recipe(str(tmp_path / "broken.yaml"))
    (tmp_path / "self.yaml").write_text(f"extends: {tmp_path / 'self.yaml'}")
    with pytest.raises(RecipeError, match="extends itself"):
        load_recipe(str(tmp_path / "self.yaml"))


def test_every_field_is_documented_by_its_type_and_survives_yaml():
    values = dataclasses.asdict(Recipe())
    assert from_values(yaml.safe_load(Recipe().to_yaml())) == Recipe()
    assert all(value is None or isinstance(value, (bool, int, float, str, list, dict)) for value in values.values())


# Learning rates of the papers, computed by hand: (recipe, epoch) -> learning rate.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mrla_resnet", {0: 0.1, 29: 0.1, 30: 0.01, 60: 0.001, 99: 1e-4}),
        ("mrla_efficientnet", {6: 0.048 * 0.97**2, 24: 0.048 * 0.97**10, 240: 0.048 * 0.97**100}),
        ("mrla_deit", {0: 1e-6, 5: 1e-5 + 0.00099 * 0.5 * (1 + 0.9986295), 150: 0.000505}),
        ("rla_cifar", {0: 0.1, 149: 0.1, 150: 0.01, 225: 0.001, 299: 0.001}),
        ("rla_resnet", {0: 0.1, 30: 0.01, 119: 1e-4}),
        ("rla_mobilenetv2", {0: 0.045, 1: 0.045 * 0.98, 100: 0.045 * 0.98**100}),
        ("rla_refined", {0: 0.0, 1: 0.02, 100: 0.05}),
        ("halonet_h7", {0: 0.0, 5: 0.8, 350: 0.0125}),
        ("halonet_ablation", {75: 0.05}),
        ("halonet_pretrain_21k", {1: 0.08, 45: 0.08}),
        ("halonet_finetune", {0.25: 0.008, 4: 0.008}),
        ("rest_ablation", {0: 0.0, 1: 0.08, 10: 0.4, 30: 0.04, 60: 0.004}),
        ("mrla_banet", {0: 0.0, 1: 0.02, 50: 0.05, 100: 0.0}),
        ("mrla_mixup", {0: 0.1, 30: 0.01}),
    ],
)
def test_learning_rates_are_those_of_the_paper(name, expected):
    import torch
    from timm.scheduler.scheduler import Scheduler

    from interlayer.training.optimization import make_scheduler

    recipe, steps = load_recipe(name), 100
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=recipe.scaled_lr)
    scheduler = make_scheduler(recipe, optimizer, steps)
    assert isinstance(scheduler, Scheduler)
    for epoch, lr in expected.items():
        scheduler.step(int(epoch))
        scheduler.step_update(round(epoch * steps))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(lr, rel=2e-3, abs=1e-9), (name, epoch)


def test_halonets_magnitudes_and_sizes_are_those_of_the_paper():
    magnitudes, sizes = [6, 8, 10, 14, 17, 19, 24, 31], [256, 256, 256, 320, 384, 448, 512, 600]
    for index, (magnitude, size) in enumerate(zip(magnitudes, sizes, strict=True)):
        recipe = load_recipe(f"halonet_h{index}")
        assert recipe.auto_augment.startswith(f"rand-m{magnitude}-")
        assert recipe.image_size == size


@pytest.mark.parametrize(
    ("name", "crop"),
    [
        ("mrla_resnet", "scaled"),  # B.1.1: "exactly the same data augmentation" as the original ResNet
        ("mrla_mixup", "scaled"),
        ("rla_resnet", "scaled"),  # B.2.1: "scale augmentation"
        ("rla_refined", "scaled"),  # B.2.2 adds refinements to B.2.1
        ("rest_ablation", "scaled"),  # "the simplest data augmentation" of ResNet
        ("rla_mobilenetv2", "resized"),  # "following the settings" of MobileNetV2
        ("mrla_banet", "resized"),  # BA-Net's program
        ("cb_deit", "resized"),  # 4.2: "the random resized crop"
    ],
)
def test_the_crops_are_those_that_the_texts_ask_for(name, crop):
    assert load_recipe(name).crop == crop


def test_the_batch_of_plain_attention_is_below_that_of_efficient_attention():
    """ResT, A.3: the batch of MSA was reduced to 512, and the learning rate follows the batch."""
    efficient, plain = load_recipe("rest_ablation"), load_recipe("rest_ablation", ["batch_size=512"])
    assert (efficient.batch_size, efficient.scaled_lr) == (2048, pytest.approx(0.4))
    assert plain.scaled_lr == pytest.approx(0.1)
    assert "model_options.attention=msa batch_size=512" in recipe_text("rest_ablation")


@pytest.mark.parametrize(("model", "size"), [("efficientnet_b0_mrla_light", 224), ("efficientnet_b1_mrla_light", 240)])
def test_the_image_size_of_efficientnets_follows_the_model(model, size):
    import timm

    from interlayer.training.data import ImageTransform

    recipe = load_recipe("mrla_efficientnet", model=model)
    assert ImageTransform.of(timm.create_model(model), recipe).size == size


def test_both_readings_of_the_decay_in_fine_tuning_are_named():
    text = recipe_text("halonet_finetune")
    assert load_recipe("halonet_finetune").weight_decay == 0
    assert "weight_decay=8e-5 is the other reading" in text


def test_a_colon_without_options_is_refused():
    from interlayer.models.build import split_name

    with pytest.raises(ValueError, match=r"expected NAME\+MECHANISM"):
        split_name("vit_tiny_patch16_224+cb:")
