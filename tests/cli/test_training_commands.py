"""The commands train, compare, evaluate, predict and recipes, run in separate processes."""

import json
import os
import shutil

import numpy as np
import pytest
import safetensors.torch
import timm
from command_line import fails, run, run_forked
from PIL import Image
from sklearn.datasets import load_digits

from interlayer.training.data import ClassNames
from interlayer.training.recipe import list_recipes, read_recipe

TINY = ["model_options.blocks=1", "model_options.widths=[8,8,16]", "image_size=8", "batch_size=128", "epochs=2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of `interlayer train` on the digits."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    result = run("train", "--recipe", "digits", "--model", "preresnet20_cifar", "--output", folder, *TINY)
    assert result.returncode == 0, result.stderr
    return folder, result


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder with some digits as image files."""
    folder = tmp_path_factory.mktemp("pictures")
    digits = load_digits()
    for index in range(5):
        pixels = (digits.images[index] * (255 / 16)).astype(np.uint8)
        Image.fromarray(pixels).resize((30, 30)).save(folder / f"{digits.target[index]}.png")
    return folder


def test_train_shows_progress_and_writes_a_run(trained):
    folder, result = trained
    assert "epoch 2/2" in result.stderr
    assert "images/s" in result.stderr
    assert "test accuracy" in result.stdout
    assert (folder / "report.html").is_file()
    recipe = read_recipe(folder / "recipe.yaml")
    assert (recipe.epochs, recipe.batch_size, recipe.model) == (2, 128, "preresnet20_cifar")
    assert (folder / "recipe.yaml").read_text().startswith("# interlayer train --recipe digits")


def test_train_refuses_a_folder_that_holds_a_run(trained):
    folder, _ = trained
    message = fails("train", "--recipe", "digits", "--model", "preresnet20_cifar", "--output", folder)
    assert "already holds a run: --resume" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["epoch=3"], "unknown key 'epoch' in the recipe; did you mean 'epochs'?"),
        (["learning_rate=0.1"], "did you mean 'lr'? `interlayer recipes --keys` lists all keys"),
        (["--epochs", "3"], "no such option: --epochs; values of the recipe are written without dashes: epochs=3"),
        (["epochs=soon"], "epochs must be a whole number, got 'soon'"),
        (["output=here"], "output is an option of the command, not a key of recipes: write --output here"),
        (["resnet50+cb:scaled=true"], "got 'resnet50+cb:scaled=true'; did you mean --model resnet50+cb:scaled=true?"),
        (["finetune"], "expected key=value, got 'finetune'; did you mean --recipe finetune?"),
        (["/"], "expected key=value, got '/'; did you mean --data /?"),
        (["--recipe", "rla_cifer"], "did you mean 'rla_cifar'?"),
        (["--model", "resnet5O"], "unknown model 'resnet5O'"),
        (["--data", "/nowhere"], "/nowhere: no such folder"),
        ([], "names no model"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing(tmp_path, arguments, message):
    assert message in fails("train", *arguments, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("environment", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}])
def test_pretrained_weights_that_cannot_be_downloaded_fail_at_once(tmp_path, environment):
    """One sentence and no repeated requests, each of which would be a line."""
    variables = {**os.environ, "HF_HOME": str(tmp_path / "cache"), **environment}
    message = fails("train", "--recipe", "finetune", "--model", "resnet18", cwd=tmp_path, env=variables)
    assert "pretrained=true: the weights of resnet18 cannot be downloaded" in message
    assert message.endswith("give a file of them, weights=FILE")
    assert [path for path in tmp_path.rglob("*") if path.is_file() and "cache" not in path.parts] == []


def test_a_run_begins_by_saying_what_it_understood(trained):
    folder, result = trained
    said = json.loads((folder / "summary.json").read_text())["overview"]
    assert result.stdout.startswith("\n".join(said) + "\n")
    assert said[0] == "data: digits, 1,437 training and 360 test images, 10 classes: 0, 1, 2, 3, 4, ..."
    assert said[1] == "schedule: 2 epochs of 11 steps with 128 images, cosine by step, warm-up of 1 epoch"
    assert "CPU, float32, images on the device" in said[2] or "cuda" in said[2]
    assert said[3].startswith("network: preresnet20_cifar, 8 x 8 pixels, ")
    assert said[4:] == ["weights: none, all parameters are newly initialized", "learning rate: 0.1 (sgd)"]


def test_recipes_explains_a_key():
    said = run_forked("recipes", "freeze_epochs").stdout.splitlines()
    assert said[0].startswith("freeze_epochs: epochs at the start")
    assert said[1] == "  number; default 0"


def test_evaluate_says_how_well_and_where_not(trained):
    folder, _ = trained
    table = run("evaluate", folder)
    assert table.returncode == 0, table.stderr
    assert "calibration error" in table.stdout
    scores = json.loads(run_forked("evaluate", folder, "--json").stdout)
    summary = json.loads((folder / "summary.json").read_text())
    assert scores["accuracy"] == pytest.approx(summary["test"]["accuracy"])
    assert sum(entry["images"] for entry in scores["classes"]) == scores["images"] == 360
    right = sum(entry["accuracy"] * entry["images"] for entry in scores["classes"])
    assert right == pytest.approx(scores["accuracy"] * 360)


def test_evaluate_takes_a_plain_folder_whole(trained, tmp_path):
    """All images in a folder of class folders are evaluated, because none is held out for training."""
    folder, _ = trained
    digits = load_digits()
    for index in range(30):
        path = tmp_path / str(digits.target[index]) / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray((digits.images[index] * (255 / 16)).astype(np.uint8)).save(path)
    scores = json.loads(run_forked("evaluate", folder, "--data", tmp_path, "--json").stdout)
    assert scores["images"] == 30


def test_evaluate_takes_the_advice_that_it_gives_for_ambiguous_folders(trained, tmp_path):
    folder, _ = trained
    for split, count in (("val", 1), ("valid", 2)):
        for digit in range(10):
            path = tmp_path / split / str(digit)
            path.mkdir(parents=True)
            for index in range(count):
                Image.new("RGB", (8, 8)).save(path / f"{index}.png")
    message = fails("evaluate", folder, "--data", tmp_path)
    assert "holds val/ and valid/, which both name the validation split" in message
    assert "data_options.test_split=val" in message
    result = run_forked("evaluate", folder, "--data", tmp_path, "data_options.test_split=val", "--json")
    assert json.loads(result.stdout)["images"] == 10, result.stderr


def test_the_default_recipe_names_the_recipe_for_fine_tuning(trained, tmp_path):
    """Its learning rate is for training from scratch. The epoch that was tested is named, too."""
    folder, first = trained
    assert "finetune" not in first.stdout
    arguments = ["--model", "preresnet20_cifar", "--data", "digits", f"weights={folder / 'weights.safetensors'}"]
    options = [*TINY, "epochs=1", "validation=100"]
    result = run_forked("train", *arguments, *options, "--output", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    note = "note: the default recipe is for training from scratch, and lr=0.1 can destroy loaded weights; "
    assert f"\n{note}--recipe finetune is for fine-tuning them\n" in result.stdout
    assert "on 360 images (epoch 1, chosen by validation accuracy)\n" in result.stdout


def test_predict_files_and_folders(trained, pictures):
    folder, _ = trained
    one, more = pictures / "0.png", pictures
    found = json.loads(run("predict", folder, one, "--json", "--top", "2").stdout)
    assert len(found) == 1
    assert found[0]["image"] == str(one)
    assert [set(entry) for entry in found[0]["classes"]] == [{"class", "probability"}] * 2
    probabilities = [entry["probability"] for entry in found[0]["classes"]]
    assert probabilities == sorted(probabilities, reverse=True)
    table = run_forked("predict", folder, more)
    assert table.returncode == 0, table.stderr
    assert table.stdout.count(".png") == 5


def test_predict_names_what_it_cannot_read(trained, pictures, tmp_path):
    folder, _ = trained
    (tmp_path / "bad.jpg").write_bytes(b"not an image")
    message = fails("predict", folder, tmp_path)
    assert "bad.jpg cannot be used" in message
    assert message.endswith("or skip such images with --skip-bad"), "the option of predict, not of a recipe"
    assert "no such file" in fails("predict", folder, tmp_path / "none.png")
    result = run_forked("predict", folder, tmp_path, pictures / "0.png", "--skip-bad", "--json")
    assert [entry["image"] for entry in json.loads(result.stdout)] == [str(pictures / "0.png")]
    assert "bad.jpg" in result.stderr


def test_a_folder_without_a_run_is_one_sentence(tmp_path):
    assert "holds no run" in fails("evaluate", tmp_path)
    assert "holds no run" in fails("predict", tmp_path, tmp_path)


def test_a_model_without_a_run_evaluates_and_predicts(pictures, tmp_path):
    network, weights = timm.create_model("test_resnet"), tmp_path / "weights.safetensors"
    safetensors.torch.save_file(network.state_dict(), weights)
    result = run_forked("predict", "test_resnet", pictures / "0.png", f"weights={weights}", "--json", "--top", "1")
    (found,) = json.loads(result.stdout)
    assert found["classes"][0]["class"] in ClassNames.imagenet(network).names
    shutil.copytree(pictures, tmp_path / "val" / "n01440764")
    shutil.copytree(pictures, tmp_path / "val" / "tabby cat")
    arguments = ["evaluate", "test_resnet+mrla_light:channels_per_head=8", "--data", tmp_path, "device=cpu"]
    result = run_forked(*arguments, "--weights", weights)
    assert result.returncode == 0, result.stderr
    assert "tench" in result.stdout
    assert "2 of the 1,000 classes have a folder" in result.stderr
    assert "has no trained weights: give weights=FILE" in fails(*arguments)


def test_evaluate_reads_the_test_sets_of_imagenet(pictures, tmp_path):
    """ImageNet-ReaL by --labels, some of the classes by --restrict, and ImageNet-V2 by the numbers of its folders."""
    weights = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(timm.create_model("test_resnet").state_dict(), weights)
    model = ("evaluate", "test_resnet", f"weights={weights}", "image_size=32", "device=cpu", "workers=0")
    for folder in ("v2/0", "v2/10", "wrong/1000"):
        shutil.copytree(pictures, tmp_path / folder)
    (tmp_path / "val").mkdir()
    for number in (1, 2, 3):
        shutil.copy(pictures / "0.png", tmp_path / "val" / f"ILSVRC2012_val_{number:08d}.JPEG")
    real = run_forked(*model, "--data", tmp_path / "val", "--labels", "real", "--json")
    assert json.loads(real.stdout)["images"] == 2
    assert "1 of 3 images have no right label and are left out" in real.stderr
    restricted = run_forked(*model, "--data", tmp_path / "v2", "--restrict")
    assert "predictions among 2 of 1,000 classes" in " ".join(restricted.stdout.split())
    assert "2 of the 1,000 classes have a folder" in restricted.stderr
    assert "predictions are restricted to them" in restricted.stderr
    assert "1000 is no class number of ImageNet-1k" in fails(*model, "--data", tmp_path / "wrong")


def test_recipes_are_listed_and_shown():
    listed = run("recipes")
    assert all(name in listed.stdout for name in list_recipes())
    shown = run_forked("recipes", "rla_cifar")
    assert shown.stdout.splitlines()[1].startswith("# interlayer train --recipe rla_cifar")
    assert "did you mean" in fails("recipes", "rla_cifr")


def test_compare_ends_with_a_table_a_verdict_and_a_report(tmp_path):
    """A smaller version of `make run`, which trains the controls by itself."""
    small = ["model_options.embed_dim=16", "batch_size=256", "epochs=1"]
    result = run("compare", "--seeds", "2", *small, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert "test_vit+mrla_light" in said
    for control in ("mrla_light:cross_layer=false", "mrla_light:attention=false"):
        assert f"Over its control {control} (" in said
        assert f"│ control {control} " in result.stdout
    assert "points" in said
    assert "test_vit+mrla_light: switched off, " in said
    assert "would tell a difference of half a point" in said
    (report,) = tmp_path.glob("runs/*/report.html")
    assert str(report.relative_to(tmp_path)) in result.stdout
    folder = report.parent
    assert "is not empty" in fails("compare", "--output", folder)
    again = run_forked("compare", "--seeds", "2", *small, "--output", folder, "--resume", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "epoch" not in again.stderr, "nothing is trained again"
    light = folder / "test_vit+mrla_light" / "seed0"
    evaluated = run_forked("evaluate", light)
    assert "test_vit+mrla_light: switched off, " in " ".join(evaluated.stdout.split())
    drawn = run_forked("plot", "scores", light, "--output", tmp_path / "scores.png")
    assert "mrla_light changes the outputs of its blocks by " in drawn.stdout, drawn.stderr
    assert "of 64 predictions" in drawn.stdout
    assert (tmp_path / "scores.png").stat().st_size > 5000


def test_compare_with_nothing_to_compare(tmp_path):
    assert "nothing to compare resnet18 with" in fails("compare", "--model", "resnet18", cwd=tmp_path)


def test_controls_are_asked_for_by_options(tmp_path):
    plain = ["--recipe", "digits", "--model", "preresnet20_cifar+mrla_light", "--seeds", "1", *TINY, "epochs=1"]
    message = fails("compare", *plain, "--mildest-control", "--no-control", cwd=tmp_path)
    assert "--mildest-control chooses among controls, and --no-control trains none" in message
    result = run_forked("compare", *plain, "--output", tmp_path / "two", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "cross_layer=false" not in result.stdout, "only if they are asked for"
    result = run_forked("compare", *plain, "--mildest-control", "--output", tmp_path / "two", "--resume", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "mrla_light:cross_layer=false" in result.stdout
    assert "attention=false" not in result.stdout
    assert "is finished, nothing is left to do" in run_forked("resume", tmp_path / "two").stdout
    result = run_forked("resume", tmp_path / "two", "--control")
    assert result.returncode == 0, result.stderr
    assert "mrla_light:attention=false" in result.stdout
    (summary,) = (tmp_path / "two").glob("*attention_false/seed0/summary.json")
    summary.unlink()  # as if it had been stopped before this run was finished
    result = run_forked("resume", tmp_path / "two")
    assert "nothing is left to do" not in result.stdout
    assert summary.exists(), result.stderr
    run_folder = tmp_path / "two" / "preresnet20_cifar" / "seed0"
    assert "--control adds networks to a comparison" in fails("resume", run_folder, "--control")


def test_a_budget_that_is_no_time_is_one_sentence(tmp_path):
    for command in ("train", "compare"):
        message = fails(command, "--budget", "soon", "--model", "resnet18+mrla_light", cwd=tmp_path)
        assert message.endswith("expected a time such as 90s, 10m or 1h30m, got 'soon'")
