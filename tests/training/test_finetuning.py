"""Fine-tuning: new parameters are known, have their own learning rate, and can be trained alone."""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import timm
import torch
from run_folders import assert_same_run, weights
from test_trainer import stop_after

import interlayer
from interlayer.models import save_weights
from interlayer.models.build import ModelError, build_network
from interlayer.models.origin import changes_outputs, origin_of, untrained_mechanisms
from interlayer.training import Stopped, Trainer, load_recipe, train
from interlayer.training.optimization import make_optimizer, make_scheduler
from interlayer.training.overview import overview_of
from interlayer.training.processes import init_processes
from interlayer.training.recipe import RecipeError
from interlayer.training.setup import set_up

CPU = torch.device("cpu")


def network_of(recipe, classes=10):
    return build_network(
        recipe.model, num_classes=classes, model_options=recipe.model_options, weights=recipe.weights,
        image_size=recipe.image_size, zero_head=recipe.zero_head,
    )  # fmt: skip


# What is new


@pytest.mark.parametrize("model", ["resnet10t", "vit_tiny_patch16_224", "test_efficientnet"])
def test_the_mechanism_and_the_classifier_are_new(tuned, model):
    network = network_of(tuned(f"{model}+mrla_light"))
    new = set(origin_of(network).new_parameters(network))
    head = {
        name for name, p in network.named_parameters() if any(p is q for q in network.get_classifier().parameters())
    }
    assert new == head | {name for name, _ in network.named_parameters() if ".mrla." in name}
    assert origin_of(network).classes == 5


def test_with_the_same_classes_only_the_mechanism_is_new_unless_the_head_is_reset(tuned):
    network = network_of(tuned("resnet10t+mrla_light"), classes=5)
    assert all(".mrla." in name for name in origin_of(network).new_parameters(network))
    network = network_of(tuned("resnet10t", zero_head=True), classes=5)
    assert set(origin_of(network).new_parameters(network)) == {"fc.weight", "fc.bias"}


def test_a_mechanism_that_was_trained_before_is_not_new(tuned, tmp_path):
    saved = tmp_path / "attached.safetensors"
    save_weights(network_of(tuned("resnet10t+mrla_light")), saved)
    network = build_network("resnet10t+mrla_light", num_classes=10, weights=str(saved))
    assert not origin_of(network).new_parameters(network)


def test_a_classifier_that_a_state_widens_is_new(tuned):
    network = network_of(tuned("resnet10t+rla"), classes=5)
    new = origin_of(network).new_parameters(network)
    assert "fc.weight" in new
    assert "fc.bias" not in new


def test_heads_computed_from_the_loaded_attention_are_not_new(tuned):
    network = network_of(tuned("vit_tiny_patch16_224+cb:where=head,blocks=all"), classes=5)
    assert not origin_of(network).new_parameters(network)


def test_timms_own_pretrained_weights_are_told_apart_the_same_way(tuned, trained):
    options = {"pretrained_cfg_overlay": {"file": str(trained["resnet10t"]), "num_classes": 5}}
    network = build_network("resnet10t+mrla_light", num_classes=10, pretrained=True, model_options=options)
    assert torch.equal(network.conv1[0].weight, weights_of(trained["resnet10t"])["conv1.0.weight"])
    ours = network_of(tuned("resnet10t+mrla_light"))
    assert origin_of(network).loaded == origin_of(ours).loaded
    assert origin_of(network).classes == 5


def weights_of(path):
    import safetensors.torch

    return safetensors.torch.load_file(path)


def test_a_network_without_weights_has_no_origin():
    assert not origin_of(build_network("resnet10t")).source


# Learning rates


def rates(recipe, network, steps=10):
    """The learning rate of each parameter at every step: a list of {name: rate}."""
    optimizer = make_optimizer(recipe, network, CPU, origin_of(network))
    scheduler = make_scheduler(recipe, optimizer, steps)
    names, found = {id(p): name for name, p in network.named_parameters()}, []
    for step in range(recipe.epochs * steps):
        if scheduler is not None:
            scheduler.step(step // steps)
            scheduler.step_update(step)
        found.append({names[id(p)]: g["lr"] for g in optimizer.param_groups for p in g["params"]})
    assert all(len(row) == len(names) for row in found), "every parameter is in exactly one group"
    return found


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 1])
def test_new_parameters_have_a_multiple_of_the_rate_at_every_step(tuned, schedule, warmup):
    recipe = tuned(new_lr_scale=7, epochs=3, schedule=schedule, schedule_on="step", warmup_epochs=warmup)
    network = network_of(recipe)
    new = set(origin_of(network).new_parameters(network))
    plain = rates(recipe.replace(new_lr_scale=1), network)
    for row, base in zip(rates(recipe, network), plain, strict=True):
        for name, rate in row.items():
            assert rate == pytest.approx(base[name] * (7 if name in new else 1))
    assert plain[5]["fc.weight"] > 0


def test_mechanisms_have_a_rate_of_their_own(tuned):
    recipe = tuned("resnet10t+rla", new_lr_scale=2, mechanism_lr_scale=10, schedule="constant")
    network = network_of(recipe)
    row = {name: rate / recipe.lr for name, rate in rates(recipe, network)[0].items()}
    assert row["conv1.0.weight"] == pytest.approx(1)
    assert row["fc.weight"] == pytest.approx(2)
    mechanism = [name for name in row if name not in timm.create_model("resnet10t").state_dict()]
    assert [row[name] for name in mechanism] == pytest.approx([10] * len(mechanism))
    assert len(mechanism) > 10, "those that the blocks of a stage share included"
    plain = tuned("resnet10t", new_lr_scale=2, mechanism_lr_scale=10, schedule="constant")
    assert max(rates(plain, network_of(plain))[0].values()) == pytest.approx(2 * plain.lr)


@pytest.mark.parametrize("model", ["resnet10t", "vit_tiny_patch16_224", "test_efficientnet"])
def test_the_rate_decays_from_layer_to_layer_and_new_parameters_keep_theirs(tuned, model):
    recipe = tuned(f"{model}+mrla_light", layer_decay=0.5, new_lr_scale=3, schedule="constant")
    network = network_of(recipe)
    new = origin_of(network).new_parameters(network)
    row = {name: rate / recipe.lr for name, rate in rates(recipe, network)[0].items()}
    assert [row[name] for name in new] == pytest.approx([3] * len(new))
    plain = timm.create_model(model, num_classes=10, **recipe.model_options)
    layers = timm.models.group_parameters(plain, plain.group_matcher(), reverse=True)
    for name, layer in layers.items():
        if name not in new:
            assert row[name] == pytest.approx(0.5 ** (max(layers.values()) - layer)), name


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18_mrla_light", {}),
        ("preresnet20_cifar+rla", {}),
        ("rest_lite", {}),
        ("halo_h1", {}),
        ("ceit_tiny", {}),
        ("efficientnet_b0+mrla_base", {}),
        ("deit_tiny_patch16_224+mrla_light", {"depth": 4}),
    ],
)
def test_layers_decay_in_our_networks_and_in_attached_ones(tuned, name, options):
    """A parameter of a trained mechanism decays as its block does."""
    with torch.device("meta"):
        network = timm.create_model(name.split("+")[0], **options)
    if "+" in name:
        network = interlayer.attach(network.to_empty(device="cpu"), name.split("+")[1])
    layers = timm.models.group_parameters(network, network.group_matcher(), reverse=True)
    assert max(layers.values()) >= 4, "more than the stages"
    for parameter, layer in layers.items():
        block, found, _ = parameter.partition(".mrla.")
        if found:
            assert {layers[other] for other in layers if other.startswith(f"{block}.")} == {layer}, parameter


def test_a_network_that_does_not_number_its_layers_cannot_decay_them(tuned):
    recipe = tuned(layer_decay=0.7)
    with pytest.raises(RecipeError, match=r"layer_decay=0.7 needs a network that numbers its layers"):
        make_optimizer(recipe, torch.nn.Sequential(torch.nn.Linear(2, 2)), CPU)


def test_the_defaults_leave_the_groups_as_they_are(tuned):
    network = network_of(tuned())
    (group,) = make_optimizer(tuned(), network, CPU, origin_of(network)).param_groups
    assert "lr_scale" not in group
    assert [id(p) for p in group["params"]] == [id(p) for p in network.parameters()]


def test_the_log_shows_the_rate_of_the_recipe(tuned, tmp_path):
    trainer = Trainer(tuned(layer_decay=0.5, new_lr_scale=10, schedule="constant", lr=0.003), tmp_path / "run")
    next(steps := trainer.run())
    next(steps)
    assert trainer.loop.setup.lr == pytest.approx(0.003)
    trainer.close()


def test_a_warmup_that_would_not_end_is_shortened():
    recipe = load_recipe("default", ["epochs=2"])
    assert recipe.warmup_epochs == 5
    assert recipe.shortened_warmup == pytest.approx(0.4)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=recipe.lr)
    scheduler = make_scheduler(recipe, optimizer, 100)
    scheduler.step_update(40)
    assert optimizer.param_groups[0]["lr"] > 0.9 * recipe.lr
    assert load_recipe("mrla_deit", ["epochs=3"]).shortened_warmup == 0, "a part of an epoch would have no rate"
    assert load_recipe("default", ["epochs=6"]).shortened_warmup == 5


# Freezing


def state(network):
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def steps_of(recipe, folder):
    """Runs a recipe and yields its loop after every training step."""
    trainer = Trainer(recipe, folder)
    try:
        for progress in trainer.run():
            if progress.what == "training":
                yield trainer.loop
    finally:
        trainer.close()


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "ema": 0.9}], ids=["plain", "accumulated"])
def test_frozen_tensors_keep_their_bits_and_new_ones_move(tuned, tmp_path, options):
    """Includes the running statistics, and the moving average of the weights."""
    recipe = tuned(freeze_epochs=1, epochs=2, weight_decay=0.1, **options)
    start, steps = None, 0
    for loop in steps_of(recipe, tmp_path / "run"):
        setup, steps = loop.setup, steps + 1
        start = start or {n: t for n, t in state(network_of(recipe)).items() if n in setup.origin.loaded}
        if steps == 1:
            per_epoch, first = setup.batches.steps, state(setup.network)
        if steps == per_epoch:
            frozen = state(setup.network)
            assert [n for n in start if not torch.equal(start[n], frozen[n])] == []
            moved = [n for n in setup.origin.new_parameters(setup.network) if not torch.equal(first[n], frozen[n])]
            assert "fc.weight" in moved
            assert any(".mrla." in name for name in moved)
            if setup.ema is not None:
                average = setup.ema.module.state_dict()
                assert [n for n in start if not torch.equal(start[n], average[n])] == []
    assert steps == 2 * per_epoch
    final = state(setup.network)
    still = [n for n in start if torch.equal(start[n], final[n])]
    assert still == [], "all of the backbone is trained, with its statistics, when the frozen epoch is over"


def test_a_backbone_frozen_for_good_never_moves(tuned, tmp_path):
    train(tuned("test_efficientnet+mrla_light", freeze_backbone=True), tmp_path / "run")
    trained_weights, network = weights(tmp_path / "run"), network_of(tuned("test_efficientnet+mrla_light"))
    for name, tensor in network.state_dict().items():
        if name in origin_of(network).loaded:
            assert torch.equal(trained_weights[name], tensor), name


@pytest.mark.parametrize("cut", [2, 4, 5], ids=["frozen", "last frozen step", "free"])
def test_a_run_stopped_in_or_after_its_frozen_steps_goes_on_as_if_never_stopped(tuned, tmp_path, cut):
    recipe = tuned(
        freeze_epochs=1.34, epochs=2, optimizer="adamw", lr=0.001, ema=0.9, new_lr_scale=5,
        layer_decay=0.8, warmup_epochs=1, schedule_on="step",
    )  # fmt: skip
    train(recipe, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(recipe, tmp_path / "cut", stop=stop_after(cut))
    train(recipe, tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
def test_a_compiled_network_unfreezes(small, tmp_path):
    recipe = small(compile="default", epochs=1, model_options={"blocks": 1, "widths": [8, 8, 8]})
    save_weights(
        build_network(recipe.model, num_classes=5, model_options=recipe.model_options), tmp_path / "w.safetensors"
    )
    recipe = recipe.replace(freeze_epochs=0.34, weights=str(tmp_path / "w.safetensors"))
    for loop in steps_of(recipe, tmp_path / "run"):
        norm = next(m for m in loop.setup.network.modules() if isinstance(m, torch.nn.BatchNorm2d))
        if loop.setup.freeze.active:
            statistics = norm.running_mean.clone()
    assert not torch.equal(norm.running_mean, statistics)


# Messages


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"new_lr_scale": 10},
            "new_lr_scale=10.0 needs trained weights to start from: give pretrained=true or",
        ),
        ({"freeze_backbone": True, "layer_decay": 0.7}, "layer_decay=0.7, freeze_backbone=true need trained weights"),
        (
            {"new_lr_scale": 2, "mechanism_lr_scale": 10},
            "or weights=FILE, or train from scratch with new_lr_scale=1.0 mechanism_lr_scale=null$",
        ),
    ],
)
def test_there_must_be_weights_to_start_from(small, tmp_path, values, message):
    with pytest.raises(RecipeError, match=message):
        train(small(**values), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_freezing_everything_is_refused(tuned, tmp_path, trained):
    network = network_of(tuned("resnet10t"), classes=10)
    save_weights(network, tmp_path / "ten.safetensors")
    recipe = tuned("resnet10t", weights=str(tmp_path / "ten.safetensors"), freeze_epochs=1)
    with pytest.raises(RecipeError, match=r"freeze_epochs=1 leaves nothing to train: all parameters of resnet10t came"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_recipe_for_fine_tuning_demands_weights(tmp_path):
    recipe = load_recipe("finetune", ["pretrained=false"], model="resnet10t")
    with pytest.raises(RecipeError, match="give pretrained=true or weights=FILE"):
        train(recipe, tmp_path / "run")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("preresnet20_cifar", "there are no pretrained weights of preresnet20_cifar; give a file, weights=FILE$"),
        ("resnet18_mrla_light", r"weights=FILE, or start from those of its backbone, resnet18\+mrla_light$"),
    ],
)
def test_weights_that_do_not_exist_are_not_looked_for(model, message):
    with pytest.raises(ModelError, match=message):
        build_network(model, pretrained=True)


def test_cached_weights_are_loaded_without_a_network(tmp_path, trained):
    """In a process of its own, because the Hub's client reads its settings when it is imported."""
    repository = tmp_path / "hub" / "models--timm--resnet10t.c3_in1k"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    shutil.copy(trained["resnet10t"], repository / "snapshots" / "abc" / "model.safetensors")
    code = (
        "from interlayer.models.build import build_network; build_network('resnet10t', num_classes=3, pretrained=True)"
    )
    variables = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Retrying" not in done.stderr


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"new_lr_scale": 0}, "new_lr_scale must be above 0"),
        ({"mechanism_lr_scale": -1}, "mechanism_lr_scale must be above 0"),
        ({"layer_decay": 1.5}, "layer_decay must be above 0 and at most 1"),
        ({"freeze_epochs": -1}, "freeze_epochs must be at least 0"),
        ({"freeze_epochs": 1, "freeze_backbone": True}, "set one"),
        ({"freeze_epochs": 1, "sharding": "fsdp"}, "set sharding=none"),
    ],
)
def test_values_that_cannot_be_are_refused(small, values, message):
    with pytest.raises(RecipeError, match=message):
        small(**values)
    assert math.isfinite(small().new_lr_scale)


@pytest.mark.parametrize("model", ["resnet10t+halo", "resnet10t+mrla_light+halo"])
def test_untrained_layers_in_place_of_others_change_the_network(tuned, model):
    """Beside a mechanism that starts as the identity, they would be called the identity too."""
    network = network_of(tuned(model), classes=5)
    assert changes_outputs(network, origin_of(network), 64)


def test_weights_with_the_mechanism_are_not_called_untrained(tmp_path):
    """Weights that were trained with context broadcasting, which has no tensors, would be said to be changed by it."""
    name, options = "vit_tiny_patch16_224+cb", {"depth": 2, "embed_dim": 32, "num_heads": 2}
    trained = build_network(name, num_classes=5, image_size=16, model_options=options)
    save_weights(trained, tmp_path / "trained.safetensors")
    again = build_network(
        name, num_classes=5, image_size=16, model_options=options, weights=str(tmp_path / "trained.safetensors")
    )
    assert untrained_mechanisms(again, origin_of(again)) == []


def test_training_starts_from_a_stored_model(tuned, tmp_path):
    """A model in a folder or from the Hub could be evaluated and exported, but not fine-tuned."""
    start = network_of(tuned("resnet10t"), classes=5)
    save_weights(start, tmp_path / "model.safetensors")
    config = {"num_classes": 5, "input_size": [3, 32, 32], "first_conv": "conv1.0", "classifier": "fc"}
    contents = {"architecture": "resnet10t", "num_classes": 5, "pretrained_cfg": config}
    (tmp_path / "config.json").write_text(json.dumps(contents))
    recipe = tuned("resnet10t+mrla_light", weights=None, pretrained=True)
    recipe = recipe.replace(model=f"local-dir:{tmp_path}+mrla_light")
    setup = set_up(recipe, init_processes(recipe), None)
    assert torch.equal(setup.network.conv1[0].weight, start.conv1[0].weight)
    said = overview_of(setup).network[1]
    assert said.startswith(f"weights: local-dir:{tmp_path}, ")
    assert "the classifier for 5 classes is replaced by a new one for 10" in said


def test_a_replaced_classifier_is_not_spoken_of_if_the_weights_have_none(tuned, trained):
    overlay = {"pretrained_cfg_overlay": {"file": str(trained["without head"]), "num_classes": 0}}
    network = build_network("resnet10t", num_classes=10, pretrained=True, model_options=overlay)
    assert origin_of(network).classes is None
    assert set(origin_of(network).new_parameters(network)) == {"fc.weight", "fc.bias"}


@pytest.mark.parametrize("mechanism", ["se", "dia"])
def test_a_run_whose_gates_have_no_factor_is_resumed(tuned, tmp_path, mechanism):
    """Earlier versions started gates as in their papers, also from trained weights."""
    recipe = tuned(f"resnet10t+{mechanism}", ema=0.9, epochs=2)
    paper = recipe.replace(attach_options={"init": "paper"})
    train(paper, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(paper, tmp_path / "cut", stop=stop_after(2))
    file = tmp_path / "cut" / "recipe.yaml"
    file.write_text(file.read_text().replace("attach_options: {init: paper}", "attach_options: {}"))
    train(recipe, tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
