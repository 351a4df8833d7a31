"""Detectors and segmenters train, are evaluated, resume and are compared through the seam of tasks."""

import csv
import json
import pickle
import signal
import subprocess
import sys
import time

import pytest
import timm
import torch
from dense_data import HEAD, small_recipe, write_label_maps, write_objects
from run_folders import assert_same_run

from interlayer.experiments import TrainedNetwork, compare, evaluate
from interlayer.experiments.trained import read_run
from interlayer.models import save_weights
from interlayer.models.build import ModelError
from interlayer.models.dense import detector
from interlayer.tasks.detection_records import MASK_SIZE, detection_quality, pack_masks, unpack_masks
from interlayer.tasks.padded import PaddedTargets, pad_together
from interlayer.training import Trainer, train
from interlayer.training.data import open_data
from interlayer.training.files import TrainingError
from interlayer.training.processes import init_processes
from interlayer.training.recipe import RecipeError
from interlayer.training.setup import set_up

LOSSES = {
    "detect": ["class_loss", "box_loss", "objectness_loss", "proposal_loss"],
    "instances": ["class_loss", "box_loss", "mask_loss", "objectness_loss", "proposal_loss"],
    "segment": ["pixel_accuracy"],
}


@pytest.fixture(scope="session")
def objects(tmp_path_factory):
    return write_objects(tmp_path_factory.mktemp("objects"))


@pytest.fixture(scope="session")
def label_maps(tmp_path_factory):
    return write_label_maps(tmp_path_factory.mktemp("label_maps"))


@pytest.fixture
def data_of(objects, label_maps):
    return {"detect": objects, "instances": objects, "segment": label_maps}


@pytest.mark.parametrize("task", ["detect", "instances", "segment"])
def test_a_task_trains_writes_its_records_and_evaluates_as_it_tested(task, data_of, tmp_path):
    summary = train(small_recipe(task, data_of[task]), tmp_path / "run")
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    headline = {"detect": "box_ap", "instances": "mask_ap", "segment": "miou"}[task]
    assert all(f"train_{name}" in row for name in LOSSES[task])
    assert ("eval_loss" in row) == (task == "segment") == ("loss" in summary["test"])
    assert f"eval_{headline}" in row
    assert summary["chosen_by"].startswith("validation")
    run = read_run(tmp_path / "run")
    assert len(run.records["quality"]) == summary["test"]["images"] == 4
    if task == "segment":
        assert run.records["prediction"].shape == (4, 64, 64)
        assert run.records["prediction"].dtype == torch.uint8
    else:
        assert run.records["boxes"].shape == (4, 100, 4)
        assert run.records["labels"].dtype == torch.int16
        assert ("masks" in run.records) == (task == "instances")
    trained = TrainedNetwork(tmp_path / "run")
    scores = evaluate(trained)
    for name, value in summary["test"].items():
        assert scores[name] == pytest.approx(value, nan_ok=True)
    assert trained.task.show_details(scores)
    json.dumps(scores, allow_nan=False)


@pytest.mark.slow
def test_a_detector_learns_to_find_the_rectangles(objects, tmp_path):
    """Training images are the test images: boxes, labels, sizes and the metric agree."""
    root = tmp_path / "same"
    root.mkdir()
    (root / "images").symlink_to(objects / "images")
    for split in ("train", "test"):
        (root / f"{split}.json").write_text((objects / "train.json").read_text())
    recipe = small_recipe(
        "detect", root, epochs=1, epoch_steps=150, lr=1e-3, batch_size=8, head_options={**HEAD, "pyramid_channels": 32},
        shorter_side=[60, 60], color_jitter=0, frozen_norms="none", clip_grad=None, weight_decay=0,
    )  # fmt: skip
    summary = train(recipe, tmp_path / "run")
    assert summary["test"]["box_ap50"] > 0.9


@pytest.mark.slow
def test_it_is_compared_with_and_without_a_mechanism(label_maps, tmp_path):
    recipe = small_recipe("segment", label_maps)
    found = compare(recipe, ["resnet10t", "resnet10t+mrla_light"], tmp_path / "compared", seeds=[0])
    assert found.metric.name == "miou"
    assert [len(result.values) for result in found.results] == [1, 1]
    assert found.results[1].cost.parameters > found.results[0].cost.parameters
    assert all(result.cost.memory > 0 for result in found.results)
    assert found.results[1].contribution.metric.name == "miou"


def test_images_of_different_sizes_are_padded_and_their_sizes_are_kept(objects):
    recipe = small_recipe("instances", objects, batch_size=8, accumulate=2, shorter_side=[24, 48], flip=0)
    setup = set_up(recipe, init_processes(recipe), None)
    pixels, targets = next(setup.batches.epoch(0))
    assert len({tuple(size) for size in targets.sizes}) > 1, "wide and tall images"
    assert pixels.shape[-2:] == tuple(max(sides) for sides in zip(*targets.sizes, strict=True))
    for image, target, (height, width) in zip(pixels, targets, targets.sizes, strict=True):
        assert not image[:, height:].any()
        assert not image[:, :, width:].any()
        assert target["maps"].shape[1:] == (height, width)
        assert (target["boxes"][:, 2] <= width).all()
    halves = targets.tensor_split(2)
    assert [len(half) for half in halves] == [4, 4]
    assert halves[1].sizes == targets.sizes[4:]


def test_weights_of_a_backbone_are_loaded_into_it_and_keep_their_statistics(objects, tmp_path):
    plain = timm.create_model("resnet10t")
    save_weights(plain, tmp_path / "backbone.safetensors")
    recipe = small_recipe(
        "detect", objects, weights=str(tmp_path / "backbone.safetensors"), model="resnet10t+mrla_light",
        freeze_stages=1, frozen_norms="statistics", mean=[0.4, 0.4, 0.4],
    )  # fmt: skip
    setup = set_up(recipe, init_processes(recipe), None)
    network = setup.task.backbone(setup.network).network
    torch.testing.assert_close(network.layer4[0].conv1.weight, plain.layer4[0].conv1.weight)
    assert not setup.starts_changed, "the mechanism starts as the identity"
    assert not network.layer1[0].conv1.weight.requires_grad
    setup.train()
    assert not network.bn1.training
    assert setup.loading.transform.mean == (0.4, 0.4, 0.4)
    new = setup.origin.new_parameters(setup.network)
    assert "rpn.head.cls_logits.weight" in new
    assert not any(name.endswith("layer4.0.conv1.weight") for name in new)


def test_a_loss_that_is_not_finite_stops_with_the_names_of_the_images(objects, tmp_path):
    recipe = small_recipe("detect", objects, lr=1e20, optimizer="momentum", clip_grad=None)
    trainer = Trainer(recipe, tmp_path / "run")
    with pytest.raises(TrainingError, match=r"not finite at epoch 1.*train\d\.png"):
        list(trainer.run())
    trainer.close()


def test_norms_of_the_pyramid_are_an_option():
    counts = {}
    for norm in ("none", "batch", "group"):
        pyramid = detector("faster_rcnn", backbone="resnet10t", num_classes=2, pyramid_norm=norm).backbone.fpn
        counts[norm] = sum(isinstance(m, (torch.nn.GroupNorm, torch.nn.BatchNorm2d)) for m in pyramid.modules())
    assert counts == {"none": 0, "batch": 8, "group": 8}
    with (
        torch.no_grad(),
        pytest.raises(ModelError, match="pyramid_norm must be one of none, batch"),
    ):
        detector("faster_rcnn", backbone="resnet10t", num_classes=2, pyramid_norm="layer")


def test_boxes_without_masks_and_unknown_options_are_one_sentence(objects, tmp_path):
    with pytest.raises(RecipeError, match=r"head_options\.freeze_stages: set the key freeze_stages instead"):
        train(small_recipe("detect", objects, head_options={"freeze_stages": 1}), tmp_path / "a")
    with pytest.raises(RecipeError, match="anchor_sizes must be five positive numbers"):
        train(small_recipe("detect", objects, head_options={"anchor_sizes": [8, 16]}), tmp_path / "b")
    with pytest.raises(RecipeError, match="faster_rcnn has no option 'boxes'"):
        train(small_recipe("detect", objects, head_options={"boxes": 1}), tmp_path / "c")
    with pytest.raises(RecipeError, match="hiera_tiny_224 takes only images of 224 x 224 pixels"):
        train(small_recipe("detect", objects, model="hiera_tiny_224"), tmp_path / "d")
    assert not any((tmp_path / name).exists() for name in "abcd")


def test_masks_are_packed_in_their_boxes():
    mask = torch.zeros(1, 60, 80, dtype=torch.bool)
    mask[0, 10:38, 20:34] = True  # the left half of its box
    packed = pack_masks(mask, torch.tensor([[20.0, 10.0, 48.0, 38.0]]))
    assert packed.shape == (1, MASK_SIZE**2 // 8)
    unpacked = unpack_masks(packed)
    assert unpacked.shape == (1, MASK_SIZE, MASK_SIZE)
    assert unpacked[0, :, :13].all()
    assert not unpacked[0, :, 15:].any()
    assert unpack_masks(pack_masks(mask[:0], torch.zeros(0, 4))).shape == (0, MASK_SIZE, MASK_SIZE)


def test_the_quality_of_an_image_counts_confident_detections():
    boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 9.0], [50.0, 50.0, 60.0, 60.0]])
    truth = {"boxes": boxes[[0, 2]], "labels": torch.tensor([0, 1]), "iscrowd": torch.tensor([0, 0])}
    found = {"boxes": boxes, "labels": torch.tensor([0, 0, 1]), "scores": torch.tensor([0.9, 0.8, 0.4])}
    assert detection_quality(found, truth) == 0.5  # one of two detections, one of two objects
    nothing = {key: value[:0] for key, value in truth.items()}
    assert detection_quality({key: value[:0] for key, value in found.items()}, nothing) == 1.0


def test_padded_targets_move_and_pad():
    targets = PaddedTargets([(2, 3), (1, 1)], [{"boxes": torch.zeros(1, 4)}, {"boxes": torch.zeros(0, 4)}])
    assert targets.to(torch.device("meta")).targets[0]["boxes"].is_meta
    pickled = pickle.dumps(targets)
    assert b"TreeSpec" not in pickled, "torch 2.11 warns in every worker where one is unpickled"
    copied = pickle.loads(pickled)
    assert copied.sizes == targets.sizes
    assert [target["boxes"].shape for target in copied] == [(1, 4), (0, 4)]
    assert pad_together([torch.ones(1, 2, 3), torch.ones(1, 4, 1)], 7).sum() == 6 + 4 + 7 * (24 - 10)


def test_a_recipe_pads_batches_to_few_sizes(objects):
    recipe = small_recipe("detect", objects, head_options={**HEAD, "size_divisible": 96})
    setup = set_up(recipe, init_processes(recipe), open_data(recipe))
    transform = setup.network.transform
    assert {tuple(transform([image])[0].tensors.shape[-2:]) for image in torch.rand(3, 3, 40, 100)} == {(96, 192)}
    wrong = small_recipe("detect", objects, head_options={**HEAD, "size_divisible": 100})
    with pytest.raises(RecipeError, match="size_divisible must be a multiple of 32"):
        set_up(wrong, init_processes(wrong), open_data(wrong))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["instances", "segment"])
def test_a_run_that_is_killed_resumes_bit_equal(task, data_of, tmp_path):
    recipe = small_recipe(task, data_of[task], epochs=6, checkpoint_steps=1, batch_size=2, lr=1e-3)
    train(recipe, tmp_path / "whole")
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    command = [sys.executable, "-m", "interlayer", "train", "--recipe", str(tmp_path / "recipe.yaml")]
    command += ["--output", str(tmp_path / "killed"), "--resume"]
    process = subprocess.Popen(command)
    while not list((tmp_path / "killed" / "checkpoints").glob("step_*[1-9]")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "summary.json").exists()
    subprocess.run(command, check=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["detect", "segment"])
def test_two_processes_train_and_evaluate_together(task, data_of, tmp_path):
    """Each process has half of every batch and of the test images; the seeds of the augmentation are the same."""
    recipe = small_recipe(task, data_of[task])
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "interlayer",
        "train", "--recipe", str(tmp_path / "recipe.yaml"), "--output", str(tmp_path / "two"),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=300)
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert (summary["processes"], summary["test"]["images"]) == (2, 4)
    assert len(read_run(tmp_path / "two").records["quality"]) == 4


def test_other_data_is_evaluated_with_the_classes_of_the_network(objects, tmp_path):
    train(small_recipe("detect", objects, model="resnet10t"), tmp_path / "run")
    trained = TrainedNetwork(tmp_path / "run")
    other = write_objects(tmp_path / "other", (("val", 3),))
    assert evaluate(trained, str(other))["images"] == 3
    with pytest.raises(TrainingError, match="has no test split: it holds validation"):
        evaluate(trained, str(other), split="test")
    text = (other / "val.json").read_text().replace('"red"', '"green"')
    (other / "val.json").write_text(text)
    with pytest.raises(TrainingError, match="green"):
        evaluate(trained, str(other))


@pytest.mark.slow
def test_retinanet_trains_with_its_own_losses_and_labels(objects, tmp_path):
    options = {"pyramid_channels": 32, "topk_candidates": 50, "anchor_sizes": [8, 16, 32, 64, 128]}
    recipe = small_recipe("detect", objects, detector="retinanet", head_options=options)
    trainer = Trainer(recipe, tmp_path / "run")
    steps = trainer.run()
    progress = next(progress for progress in steps if progress.what == "training" and progress.step == 2)
    assert [metric.name for metric in progress.metrics] == ["class_loss", "box_loss"]
    setup = trainer.loop.setup
    assert setup.task.first_label == 0
    pixels, targets, _ = next(iter(setup.held_out))
    with torch.no_grad():
        found = setup.task.forward(setup.network.eval(), setup.batches.batch_transform.normalize(pixels), targets)
    assert all(set(entry["labels"].tolist()) <= {0, 1} for entry in found)
    trainer.close()
