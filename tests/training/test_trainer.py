"""The training loop learns, is reproducible, resumes exactly and stops on errors."""

import gc
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import safetensors.torch
import torch
from run_folders import assert_same_run, metrics, weights

from interlayer.models.checkpoints import METADATA_KEY, CheckpointError, read_checkpoint
from interlayer.training import Stopped, Trainer, TrainingError, train
from interlayer.training.checkpoint import Checkpoints
from interlayer.training.lock import FolderLock
from interlayer.training.processes import init_processes
from interlayer.training.setup import TrainingSetup
from interlayer.training.step import EpochSums, TrainStep
from interlayer.training.trainer import TrainingLoop

RICH = {
    "drop_rate": 0.2,
    "ema": 0.9,
    "mixup": 0.4,
    "erasing": 0.3,
    "optimizer": "adamw",
    "lr": 0.003,
    "clip_grad": 1.0,
    "validation": 200,
    "schedule_on": "step",
    "warmup_epochs": 1,
    "epochs": 3,
}


def stop_after(steps):
    """Returns a stop function that requests a stop after ``steps`` steps."""
    count = iter(range(10**9))
    return lambda: next(count) + 1 >= steps


def test_it_learns(small, tmp_path):
    summary = train(small(epochs=6, batch_size=64, lr=0.1), tmp_path / "run")
    assert summary["test"]["accuracy"] > 0.8
    assert summary["test"]["images"] == 360
    rows = metrics(tmp_path / "run")
    assert len(rows) == 6
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"]) / 3


def test_layer_attention_trains_the_same_way(small, tmp_path):
    recipe = small(model="preresnet20_cifar+mrla_light", attach_options={"channels_per_head": 8}, batch_size=64)
    train(recipe, tmp_path / "run")
    assert any(".mrla." in name for name in weights(tmp_path / "run"))


def test_two_runs_of_one_seed_are_the_same_and_of_two_are_not(small, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(small(seed=seed, **{**RICH, "epochs": 1}), tmp_path / name)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert metrics(tmp_path / "a") != metrics(tmp_path / "c")


@pytest.mark.parametrize("steps", [1, 3, 4, 7, 11])
def test_a_stopped_run_goes_on_as_if_it_had_never_stopped(small, tmp_path, steps):
    """Covers everything with a state: dropout, EMA, mixing, clipping, AdamW, a schedule by step, the best epoch."""
    recipe = small(**RICH)
    train(recipe, tmp_path / "whole")
    with pytest.raises(Stopped, match="stopped at"):
        train(recipe, tmp_path / "cut", stop=stop_after(steps))
    assert not (tmp_path / "cut" / "summary.json").exists()
    train(recipe, tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_images_that_workers_load_resume_too(small, digit_files, tmp_path):
    recipe = small(
        data=str(digit_files), resident="no", crop="resized", auto_augment="rand-m9-mstd0.5", batch_size=24, workers=2,
        drop_rate=0.2,
    )  # fmt: skip
    train(recipe, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(recipe, tmp_path / "cut", stop=stop_after(7))
    train(recipe.replace(workers=1), tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_run_is_not_resumed_on_other_data(small, digit_files, tmp_path):
    """It would continue in the middle of another epoch, and its test images might have been trained on."""
    data = tmp_path / "data"
    shutil.copytree(digit_files, data)
    recipe = small(data=str(data), batch_size=24)
    with pytest.raises(Stopped):
        train(recipe, tmp_path / "run", stop=stop_after(7))
    for image in sorted((data / "train" / "3").iterdir()):
        for copy in range(3):
            shutil.copy(image, image.with_stem(f"{image.stem}_{copy}"))
    with pytest.raises(TrainingError, match=r"another number of training images than the 156 that .* has now"):
        train(recipe, tmp_path / "run", resume=True)


def test_resuming_a_finished_run_changes_nothing(small, tmp_path):
    recipe = small(epochs=1)
    train(recipe, tmp_path / "run")
    before = weights(tmp_path / "run"), metrics(tmp_path / "run")
    train(recipe, tmp_path / "run", resume=True)
    after = weights(tmp_path / "run"), metrics(tmp_path / "run")
    assert before[1] == after[1]
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])


def test_the_best_validation_epoch_is_tested_once(small, tmp_path, monkeypatch):
    recipe = small(validation=200, epochs=5, batch_size=128, lr=0.3, schedule="constant")
    tested = []
    original = TrainingLoop._evaluate

    def evaluate(self, batches, *arguments, **options):
        tested.append(batches.count)
        return original(self, batches, *arguments, **options)

    monkeypatch.setattr(TrainingLoop, "_evaluate", evaluate)
    train(recipe, tmp_path / "run")
    assert tested == [200] * 5 + [360], "validation every epoch, the test images once, at the end"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    accuracies = [float(row["eval_accuracy"]) for row in metrics(tmp_path / "run")]
    assert summary["chosen_epoch"] == accuracies.index(max(accuracies)) + 1
    _, saved, _ = Checkpoints(tmp_path / "run" / "checkpoints").load()
    tested = weights(tmp_path / "run")
    assert all(torch.equal(saved["best"][name], tested[name]) for name in tested)


def test_without_validation_the_last_epoch_is_reported(small, tmp_path):
    summary = train(small(), tmp_path / "run")
    assert (summary["chosen_epoch"], summary["chosen_by"]) == (2, "last epoch")
    assert float(metrics(tmp_path / "run")[-1]["eval_accuracy"]) == summary["test"]["accuracy"]


def test_accumulated_parts_are_one_batch(small, tmp_path):
    """Without batch norm, the splits of a batch must give the gradient of the batch."""
    recipe = small(model="vit_tiny_patch16_224", model_options=VIT, image_size=16, crop="none", epochs=1)
    train(recipe, tmp_path / "whole")
    train(recipe.replace(accumulate=4), tmp_path / "parts")
    ours, theirs = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


VIT = {"depth": 2, "embed_dim": 24, "num_heads": 2, "patch_size": 8}


def test_the_moving_average_is_what_is_evaluated_and_saved(small, tmp_path):
    recipe = small(ema=0.999, epochs=1)
    train(recipe, tmp_path / "run")
    _, saved, _ = Checkpoints(tmp_path / "run" / "checkpoints").load()
    final = weights(tmp_path / "run")
    name = "head.weight"
    assert torch.equal(final[name], saved["ema"][name])
    assert not torch.equal(final[name], saved["weights"][name])


def test_bfloat16_and_channels_last_train(small, tmp_path):
    summary = train(small(precision="bfloat16", channels_last=True, epochs=4, batch_size=64), tmp_path / "run")
    assert summary["test"]["accuracy"] > 0.5


def test_training_starts_from_a_file_and_leaves_a_head_of_other_classes(small, digit_files, tmp_path):
    train(small(epochs=1), tmp_path / "first")
    recipe = small(
        epochs=1, num_classes=12, weights=str(tmp_path / "first" / "weights.safetensors"), lr=0.0, zero_head=True
    )
    train(recipe, tmp_path / "second")
    first, second = weights(tmp_path / "first"), weights(tmp_path / "second")
    assert torch.equal(first["stem.0.weight"], second["stem.0.weight"])
    assert second["head.weight"].shape[0] == 12
    assert not second["head.weight"].any()
    attached = recipe.replace(
        model="preresnet20_cifar+mrla_light", attach_options={"channels_per_head": 8}, num_classes=10, zero_head=False
    )
    train(attached, tmp_path / "third")
    assert torch.equal(first["head.weight"], weights(tmp_path / "third")["head.weight"])


def test_a_closed_run_leaves_no_network_behind(small, tmp_path):
    """Runs of a comparison share the processes and the data, which must not keep a reference to a network."""
    trainer = Trainer(small(epochs=1), tmp_path / "run", processes=(processes := init_processes(small())))
    for _ in trainer.run():
        pass
    trainer.close()
    network = weakref.ref(trainer.loop.setup.network)
    assert network() is not None
    del trainer
    gc.collect()
    assert network() is None
    assert processes.world_size == 1


# Errors


def test_a_loss_that_is_not_finite_stops_before_a_checkpoint(small, digit_files, tmp_path):
    recipe = small(data=str(digit_files), batch_size=30, epochs=9, lr=0.0, warmup_epochs=0, schedule="constant")
    with pytest.raises(Stopped):  # two steps before the end of an epoch: the first of them still has a finite loss
        train(recipe, tmp_path / "run", stop=stop_after(2))
    recipe = recipe.replace(lr=1e30)
    (tmp_path / "run" / "recipe.yaml").write_text(recipe.to_yaml())
    state = Checkpoints(tmp_path / "run" / "checkpoints").all()[-1] / "state.pt"
    saved = torch.load(state, weights_only=True)
    for group in saved["optimizer"]["param_groups"]:
        group["lr"] = 1e30
    torch.save(saved, state)
    with pytest.raises(
        TrainingError, match=r"not finite at epoch 1, step 4 of 4, learning rate 1e\+30;.*\.png"
    ) as error:
        train(recipe, tmp_path / "run", resume=True)
    assert str(error.value).count(".png") == 30, "all files of the batch are named"
    kept = list((tmp_path / "run" / "checkpoints").glob("*/weights.safetensors"))
    assert kept
    for path in kept:
        assert all(torch.isfinite(t).all() for t in read_checkpoint(path)[0].values())


def test_one_bad_image_value_is_found_in_its_own_step(small, tmp_path, monkeypatch):
    """The error must name the step with the bad loss, not the step at which it was detected."""
    trainer = Trainer(small(epochs=1, batch_size=128), tmp_path / "run")
    original = TrainStep.forward_backward

    def poisoned(self, batch, weight):
        if self.steps_run == 4:
            with torch.no_grad():
                self.setup.network.head.bias += float("nan")
        original(self, batch, weight)

    monkeypatch.setattr(TrainStep, "forward_backward", poisoned)
    monkeypatch.setattr(EpochSums, "must_read", lambda self, step: False)
    with pytest.raises(TrainingError, match="step 5 of 11"):
        list(trainer.run())
    trainer.close()


def test_weights_that_are_not_finite_reach_no_checkpoint(small, tmp_path, monkeypatch):
    trainer = Trainer(small(epochs=2, checkpoint_steps=1), tmp_path / "run")
    steps = trainer.run()
    while next(steps).step != 2:
        pass
    trainer.loop.setup.optimizer.param_groups[0]["lr"] = float("inf")
    monkeypatch.setattr(TrainingSetup, "set_lr", lambda self, epoch, step: None)
    with pytest.raises(TrainingError, match=r"not finite.*the last checkpoint is from before"):
        list(steps)
    trainer.close()
    _, saved, state = Checkpoints(tmp_path / "run" / "checkpoints").load()
    assert state["position"] == [0, 2]
    assert all(torch.isfinite(tensor).all() for tensor in saved["weights"].values())


def test_two_runs_in_one_folder_refuse_each_other(small, tmp_path):
    lock = FolderLock(tmp_path / "run")
    with pytest.raises(TrainingError, match=r"run is in use by process \d+"):
        Trainer(small(), tmp_path / "run")
    lock.release()
    train(small(epochs=1), tmp_path / "run")
    with pytest.raises(TrainingError, match="already holds a run: --resume"):
        train(small(epochs=1), tmp_path / "run")


def test_a_folder_of_another_recipe_is_refused(small, tmp_path):
    train(small(epochs=1), tmp_path / "run")
    with pytest.raises(TrainingError, match=r"another recipe \(lr 0\.05 -> 0\.1\)"):
        train(small(epochs=1, lr=0.1), tmp_path / "run", resume=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_one_sentence(small, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(TrainingError, match="could not be written: Permission denied"):
        train(small(), tmp_path / "closed" / "run")


def test_a_file_in_the_place_of_the_folder_is_one_sentence(small, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TrainingError, match="file is a file: choose another name for the folder"):
        train(small(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_that_does_not_start_leaves_no_folder_behind(small, tmp_path):
    """Also not the parents that it created; a folder that was there before stays."""
    with pytest.raises(TrainingError, match="no such folder"):
        train(small(data=str(tmp_path / "nothing")), tmp_path / "runs" / "group" / "mine")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    with pytest.raises(TrainingError, match="no such folder"):
        train(small(data=str(tmp_path / "nothing")), tmp_path / "runs" / "mine")
    assert (tmp_path / "runs").is_dir()


def test_a_path_under_a_file_is_one_sentence(small, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="could not be written: Not a directory"):
        train(small(), tmp_path / "file" / "run")


def run_with_a_limit(trainer, hard_limit):
    """Trains with file sizes limited to 4 KiB from the second epoch on."""
    for progress in trainer.run():
        if progress.epoch == 1 and progress.what == "training":
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard_limit))


def test_a_full_disk_leaves_the_last_checkpoint_intact(small, tmp_path):
    """Limits the size of files after the first checkpoint, which has the effect of a full disk."""
    recipe = small(epochs=3)
    trainer = Trainer(recipe, tmp_path / "run")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(TrainingError, match=r"could not be written.*intact"):
            run_with_a_limit(trainer, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        trainer.close()
    kept = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [path.name for path in kept] == ["step_000000005"]
    train(recipe, tmp_path / "run", resume=True)
    train(recipe, tmp_path / "whole")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_folder_with_checkpoints_is_not_taken_for_an_empty_one(small, tmp_path):
    with pytest.raises(Stopped):
        train(small(), tmp_path / "run", stop=stop_after(2))
    (tmp_path / "run" / "recipe.yaml").unlink()
    with pytest.raises(TrainingError, match="already holds a run"):
        train(small(lr=0.7), tmp_path / "run")


def test_a_checkpoint_of_an_earlier_step_is_not_the_first_to_go(tmp_path):
    """Saving the same step again must replace the old checkpoint completely."""
    network = torch.nn.Linear(1, 1)
    checkpoints = Checkpoints(tmp_path)
    for number in (1, 2, 2, 3):
        checkpoints.save(number, network, {"weights": network.state_dict()}, {"number": number})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_000000002", "step_000000003"]


def test_a_wide_head_of_an_earlier_run_is_resumed_with_its_function(small, tmp_path):
    """Earlier versions scaled scores by other channels, and only the description of a checkpoint tells that."""
    options = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "num_heads": 3, "depth": 2}
    recipe = small(model="vit_tiny_patch16_224+cb:where=wide_head", model_options=options, epochs=2)
    with pytest.raises(Stopped):
        train(recipe, tmp_path / "now", stop=stop_after(3))
    shutil.copytree(tmp_path / "now", tmp_path / "earlier")
    (file,) = (tmp_path / "earlier" / "checkpoints").glob("*/weights.safetensors")
    tensors, descriptions = read_checkpoint(file)
    (name,) = (name for name, saved in descriptions.items() if saved.pop("scale", None))
    for tensor in (tensors[f"{name}.qk.weight"], tensors[f"{name}.qk.bias"]):
        tensor[: len(tensor) // 2] *= (8 / 12) ** 0.5  # scores were divided by sqrt(8), now by sqrt(12)
    safetensors.torch.save_file(tensors, file, metadata={METADATA_KEY: json.dumps(descriptions)})
    for run in ("now", "earlier"):
        train(recipe, tmp_path / run, resume=True)
    torch.testing.assert_close(weights(tmp_path / "earlier"), weights(tmp_path / "now"))


def test_a_run_whose_network_has_changed_is_not_resumed(small, tmp_path):
    """The recipe of the run was edited, or a later version builds another network of it."""
    with pytest.raises(Stopped):
        train(small(model="preresnet20_cifar+nl:blocks=all"), tmp_path / "run", stop=stop_after(2))
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("nl:blocks=all", "nl"))
    with pytest.raises(
        CheckpointError, match=r"does not fit the network of the recipe: .*nl:blocks=all for earlier files"
    ):
        train(small(model="preresnet20_cifar+nl"), tmp_path / "run", resume=True)


def test_tensorboard_keeps_every_epoch_of_a_resumed_run(small, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = small(epochs=3, tensorboard=True)
    with pytest.raises(Stopped):
        train(recipe, tmp_path / "run", stop=stop_after(12))
    train(recipe, tmp_path / "run", resume=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("eval/accuracy")] == [1, 2, 3]


def test_workers_do_not_hold_the_folder_of_a_killed_run(small, digit_files, tmp_path):
    """Workers survive SIGKILL of the run for seconds, but the run can be resumed immediately."""
    recipe = small(data=str(digit_files), resident="no", crop="resized", batch_size=24, workers=2, epochs=300)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    command = [sys.executable, "-m", "interlayer", "train", "--recipe", str(tmp_path / "recipe.yaml")]
    process = subprocess.Popen([*command, "--output", str(tmp_path / "run")], stderr=subprocess.PIPE, text=True)
    for _ in range(2):
        process.stderr.readline()
    process.kill()
    process.wait()
    FolderLock(tmp_path / "run").release()


def test_a_damaged_checkpoint_falls_back_to_the_one_before(small, tmp_path):
    recipe = small(epochs=3)
    with pytest.raises(Stopped):
        train(recipe, tmp_path / "run", stop=stop_after(12))
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    (newest / "state.pt").write_bytes(b"damaged")
    train(recipe, tmp_path / "run", resume=True)
    train(recipe, tmp_path / "whole")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_checkpoints_are_read_without_running_code(small, tmp_path):
    import pickle

    recipe = small(epochs=1)
    with pytest.raises(Stopped):
        train(recipe, tmp_path / "run", stop=stop_after(2))

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    (path,) = (tmp_path / "run" / "checkpoints").iterdir()
    with open(path / "state.pt", "wb") as file:
        pickle.dump(Evil(), file)
    with pytest.raises(TrainingError, match="no checkpoint can be read"):
        train(recipe, tmp_path / "run", resume=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "resnet5O"}, "unknown model 'resnet5O'; did you mean resnet50"),
        ({"model": ""}, "names no model"),
        ({"model": "preresnet20_cifar+mrla_heavy"}, "mrla_heavy"),
        ({"optimizer": "sgdd"}, "optimizer=sgdd cannot be made"),
        ({"device": "cuda"}, "torch sees no GPU"),
        ({"device": "tpu"}, "device must be cpu or cuda"),
        ({"precision": "float16"}, "float16 needs a GPU"),
        ({"sharding": "fsdp"}, "needs several processes"),
        ({"model_options": {"nonsense": 1}}, "cannot be built with nonsense=1"),
        ({"attach_options": {"channels_per_head": 8}}, "attach_options need a mechanism"),
        ({"weights": "/nowhere.safetensors"}, "no such file"),
        ({"wandb": "project"}, "pip install wandb"),
        ({"model": "vit_tiny_patch16_224", "model_options": {}, "image_size": 10}, "does not take images of 10 x 10"),
        ({"model": "preresnet20_cifar+"}, "names no mechanism after"),
        ({"mean": [0.5, 0.5]}, "mean must be three numbers"),
        ({"epochs": float("inf")}, "epochs must be a finite number"),
        ({"interpolation": "random"}, "interpolation must be one of"),
        ({"auto_augment": "rand-mX"}, "auto_augment=rand-mX is not known to timm"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(small, tmp_path, changes, message):
    if "wandb" in changes and importlib.util.find_spec("wandb"):
        pytest.skip("wandb is installed here")
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ValueError, match=message):
        train(small(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists(), "nothing is left behind"


# Files of a run


def test_a_run_leaves_what_its_users_need(small, tmp_path):
    train(small(tensorboard=True, epochs=1), tmp_path / "run", command="interlayer train x")
    found = {path.name for path in (tmp_path / "run").iterdir()}
    assert found >= {"recipe.yaml", "metrics.csv", "summary.json", "weights.safetensors", "checkpoints", "tensorboard"}
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))
    assert "# interlayer train x" in (tmp_path / "run" / "recipe.yaml").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["versions"]["torch"] == torch.__version__.split("+")[0]


def test_bad_images_are_counted_in_the_summary(small, digit_files, tmp_path):
    import shutil

    shutil.copytree(digit_files, tmp_path / "data")
    (tmp_path / "data" / "train" / "1" / "bad.png").write_bytes(b"x")
    summary = train(small(data=str(tmp_path / "data"), on_bad_image="skip", batch_size=60, epochs=1), tmp_path / "run")
    assert [name.rsplit("/", 1)[1] for name in summary["bad_images"]] == ["bad.png"]


@pytest.mark.parametrize(
    ("number", "loaded"),
    [
        (signal.SIGTERM, True),
        (signal.SIGINT, False),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_exits_cleanly(small, digit_files, tmp_path, number, loaded):
    """A signal to a separate process gives exit code 128 + signal, a checkpoint and the command to resume.

    Terminals and schedulers send it to every process of a group, so also to the workers that load images.
    """
    files = {"data": str(digit_files), "resident": "no", "crop": "resized", "batch_size": 24, "workers": 2}
    recipe = small(epochs=200, **(files if loaded else {}))
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "interlayer", "train", "--recipe", str(tmp_path / "recipe.yaml")]
    process = subprocess.Popen(
        [*command, "--output", str(folder)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    timer = threading.Timer(120, process.kill)
    timer.start()
    seen = [process.stderr.readline() for _ in range(3)]
    time.sleep(0.2)  # until workers are loading images
    os.killpg(process.pid, number)
    rest = process.stderr.read()
    timer.cancel()
    assert process.wait() == 128 + number, (seen, rest)
    assert f"a checkpoint is saved, go on with: interlayer resume {folder}" in rest
    assert "Traceback" not in rest
    assert list((folder / "checkpoints").glob("step_*"))


def test_a_comparison_does_not_wait_for_its_workers(small, digit_files, tmp_path):
    """`kill` and `timeout` send a signal to the main process alone. It must end the workers that load its images."""
    recipe = small(data=str(digit_files), resident="no", crop="resized", batch_size=2, workers=1, epochs=200)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    command = [sys.executable, "-m", "interlayer", "compare", "--recipe", str(tmp_path / "recipe.yaml"), "--seeds", "1"]
    command += ["--model", "preresnet20_cifar", "--model", "preresnet20_cifar+eca", "--output", str(tmp_path / "runs")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        timer = threading.Timer(60, process.kill)
        timer.start()
        while "learning rate" not in process.stdout.readline() and process.poll() is None:
            pass
        time.sleep(1)  # until workers are loading images
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        timer.cancel()
        assert process.wait() == 128 + signal.SIGTERM, rest
    assert "checkpoints are saved" in rest


@pytest.mark.slow
@pytest.mark.parametrize("how", ["default", "tuned"])
def test_a_compiled_network_trains_as_the_plain_one(small, tmp_path, how):
    recipe = small(batch_size=128)
    train(recipe, tmp_path / "plain")
    train(recipe.replace(compile=how), tmp_path / "compiled")
    for row, other in zip(metrics(tmp_path / "plain"), metrics(tmp_path / "compiled"), strict=True):
        assert float(row["train_loss"]) == pytest.approx(float(other["train_loss"]), rel=1e-2)
