"""The command line, run in a separate process as a user runs it."""

import json
import os
import subprocess
import sys
import time

import pytest
import timm
import torch
from command_line import fails, run, run_forked
from PIL import Image
from safetensors import safe_open

import interlayer

COMMANDS = [
    *("train", "compare", "resume", "evaluate", "robustness", "predict", "recipes", "models"),
    *("tables", "convert", "profile", "demo", "plot"),
]


def test_help_is_quick_and_names_every_command():
    times = []
    for _ in range(3):
        start = time.perf_counter()
        result = run("--help")
        times.append(time.perf_counter() - start)
    assert result.returncode == 0
    assert all(command in result.stdout for command in COMMANDS)
    assert min(times) < 1.5


def test_help_imports_nothing_heavy():
    program = (
        "import sys; import interlayer_cli.app; print([m for m in ('torch', 'timm', 'matplotlib') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(command):
    result = run(command, "--help")
    assert result.returncode == 0
    assert f"interlayer {command}" in result.stdout


def test_version():
    assert run("--version").stdout.strip() == f"interlayer {interlayer.__version__}"


def test_models():
    result = run("models", "deit_tiny_*", "--parameters")
    assert result.returncode == 0
    assert "deit_tiny_mrla_light" in result.stdout
    assert "5,749,792" in result.stdout
    assert "no model matches 'alexnet*'" in fails("models", "alexnet*")


def test_tables():
    result = run("tables", "halonet")
    assert result.returncode == 0, result.stderr
    assert "every figure that should agree does" in result.stdout
    assert "67.400" in result.stdout
    assert "-0.478 *" in result.stdout
    assert "* 1 figure: H3 fits 12.3M only with a last convolution of 1280 channels" in result.stdout
    assert "unknown paper 'nobody', expected one of mrla, rla, halonet" in fails("tables", "nobody")


def test_plot_of_shared_weights(tmp_path):
    """Both forms are plotted and fitted. A checkpoint without such weights or an existing figure is an error."""
    for sharing in ("lag", "ordinal"):
        model = timm.create_model(f"densenet100_cifar_shared_{sharing}")
        interlayer.save_weights(model, tmp_path / f"{sharing}.safetensors")
    files = [str(tmp_path / f"{sharing}.safetensors") for sharing in ("lag", "ordinal")]
    picture = tmp_path / "weights.png"
    result = run("plot", "shared-weights", *files, "--output", str(picture))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ordinal") >= 3
    with Image.open(picture) as image:
        assert image.size[0] > 800
    interlayer.save_weights(timm.create_model("preresnet20_cifar"), tmp_path / "other.safetensors")
    missing = fails("plot", "shared-weights", str(tmp_path / "other.safetensors"), "--output", str(tmp_path / "b.png"))
    assert "has no shared 1x1 weights" in missing
    assert not (tmp_path / "b.png").exists()


def test_tables_exits_1_on_a_difference():
    program = (
        "import interlayer.papers.tables as t; "
        "t.TABLES['mrla'] = lambda: [t.PaperRow('1', 'wrong', 'resnet18', 12.9, 1.8)]; "
        "import sys; sys.argv = ['interlayer', 'tables', 'mrla']; from interlayer_cli.app import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    assert "does not agree with the paper: table 1, wrong: parameters" in result.stderr


@pytest.fixture
def published(tmp_path):
    """A checkpoint in the format of the authors' code."""
    model = timm.create_model("resnet18_mrla_light", reading="published", num_classes=4)
    renames = {"decay": "lambda_t", "query.weight": "mrla.Wq.weight", "key.weight": "mrla.Wk.weight"}
    renames["value.weight"] = "mrla.Wv.weight"
    state = {}
    for name, tensor in model.state_dict().items():
        head, found, tail = name.partition(".mrla.")
        if found:
            name = f"{head}.bn_mrla.{tail[5:]}" if tail.startswith("norm.") else f"{head}.mrla.{renames[tail]}"
        state[f"module.{name}"] = tensor
    torch.save({"state_dict": state, "epoch": 100, "best_acc1": 77.7}, tmp_path / "checkpoint.pth")
    return tmp_path / "checkpoint.pth", model


def test_convert(published, tmp_path):
    source, model = published
    target = tmp_path / "converted.safetensors"
    result = run("convert", source, target, "--model", "resnet18_mrla_light")
    assert result.returncode == 0, result.stderr
    assert "tensors of resnet18_mrla_light, reading 'published'" in result.stdout
    with safe_open(target, framework="pt") as file:
        assert '"reading": "published"' in file.metadata()["interlayer"]
    other = timm.create_model("resnet18_mrla_light", reading="published", num_classes=4)
    interlayer.load_weights(other, target)
    assert torch.equal(other.layer4[1].mrla.decay, model.layer4[1].mrla.decay)
    assert "exists; give --overwrite" in fails("convert", source, target, "--model", "resnet18_mrla_light")
    paper = timm.create_model("resnet18_mrla_light", num_classes=4)
    with pytest.raises(interlayer.CheckpointError, match="was saved with reading=published"):
        interlayer.load_weights(paper, target)


@pytest.mark.slow
def test_convert_a_network_of_one_reading(tmp_path):
    """ResT has no readings, so --reading is an error."""
    model = timm.create_model("rest_lite", num_classes=3)
    torch.save({"model": model.state_dict()}, tmp_path / "rest.pth")
    line = ("convert", tmp_path / "rest.pth", tmp_path / "rest.safetensors", "--model", "rest_lite")
    assert "there is one reading of rest_lite: leave --reading out" in fails(*line, "--reading", "published")
    result = run(*line)
    assert result.returncode == 0, result.stderr
    other = timm.create_model("rest_lite", num_classes=3)
    interlayer.load_weights(other, tmp_path / "rest.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


def test_convert_refuses_what_does_not_fit_and_writes_nothing(published, tmp_path):
    source, _ = published
    target = tmp_path / "converted.safetensors"
    assert "unknown model 'resnet19_mrla_light'; did you mean" in fails(
        "convert", source, target, "--model", "resnet19_mrla_light"
    )
    wrong = fails("convert", source, target, "--model", "resnet34_mrla_light")
    assert "missing: layer1.2.conv1.weight" in wrong
    assert "build it with reading='published'" in fails(
        "convert", source, target, "--model", "resnet18_mrla_light", "--reading", "paper"
    )
    assert "no such file" in fails("convert", tmp_path / "absent.pth", target, "--model", "resnet18_mrla_light")
    (tmp_path / "noise.pth").write_bytes(os.urandom(100))
    assert "cannot be read as a checkpoint" in fails(
        "convert", tmp_path / "noise.pth", target, "--model", "resnet18_mrla_light"
    )
    assert not target.exists()


def test_profile():
    result = run("profile", "resnet18_mrla_light", "--batch-size", 2, "--image-size", 64, "--steps", 1)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("resnet18") >= 2, "the plain backbone is measured too"
    assert "x)" in result.stdout
    assert "unknown model 'resnet18_mrla_ligth'; did you mean resnet18_mrla_light" in fails(
        "profile", "resnet18_mrla_ligth"
    )
    assert "--precision must be float32" in fails("profile", "resnet18", "--precision", "int8")
    assert "on a GPU alone" in fails("profile", "resnet18", "--device", "cpu", "--graph")
    assert "Invalid value" in fails("profile", "resnet18", "--batch-size", "many")
    assert "unknown weights 'nonsense' of 'resnet18'" in fails("profile", "resnet18.nonsense")
    assert "could not be measured at 7 pixels" in fails("profile", "densenet121", "--image-size", 7)
    models = ("vit_tiny_patch16_224", "vit_tiny_patch16_224+mrla_light:channels_per_head=8")
    result = run_forked("profile", *models, "--batch-size", 1, "--image-size", 64, "--steps", 1)
    assert result.returncode == 0, result.stderr
    plain, attached = [line for line in result.stdout.splitlines() if "64 x 64" in line]
    assert "+mrla_light" in attached
    assert "(+0." in attached, "what the mechanism adds"
    assert "(+" not in plain
    assert "did you mean mrla_light? Expected one of mrla_light," in fails("profile", "resnet18+mrla_lite")
    options = fails("profile", "resnet18+mrla_light:chanels_per_head=8")
    assert "did you mean channels_per_head? Expected one of channels_per_head," in options


def test_demo(tmp_path):
    result = run("demo", "--backbone", "resnet10t", "--output", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "latency" in result.stdout
    assert (tmp_path / "out" / "resnet10t_mrla_light_scores.png").stat().st_size > 5000
    assert "has no blocks to attach to" in fails("demo", "--backbone", "vgg11", "--output", tmp_path / "new")
    assert not (tmp_path / "new").exists()


NAMED = "preresnet20_cifar+mrla_light:channels_per_head=8"
SMALL = [
    "model_options.blocks=1", "model_options.widths=[8,8,16]", "image_size=8", "batch_size=128", "epochs=1",
    "workers=0", "attach_options={}",
]  # fmt: skip


def test_profile_takes_a_mechanism_with_options():
    result = run_forked("profile", NAMED, "--batch-size", 1, "--image-size", 16, "--steps", 1)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("preresnet20_cifar") >= 2, "the plain backbone is measured too"
    assert "channels_per_head" in result.stdout
    assert "the options do not fit rla" in fails("profile", "preresnet20_cifar+rla:colour=red")


def test_train_and_evaluate_take_a_mechanism_with_options(tmp_path):
    folder = tmp_path / "run"
    trained = run_forked("train", "--recipe", "digits", "--model", NAMED, "--output", folder, *SMALL)
    assert trained.returncode == 0, trained.stderr
    result = run_forked("evaluate", folder, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["model"] == NAMED
    with safe_open(folder / "weights.safetensors", framework="pt") as file:
        assert '"channels_per_head": "8"' in file.metadata()["interlayer"]


def test_compare_takes_a_mechanism_with_options(tmp_path):
    """A model is compared with the plain backbone in its name."""
    line = ("compare", "--recipe", "digits", "--model", NAMED, "--seeds", "1", *SMALL)
    result = run_forked(*line, "--output", tmp_path / "runs")
    assert result.returncode == 0, result.stderr
    assert f"{NAMED} against preresnet20_cifar" in " ".join(result.stdout.split())


def test_convert_takes_a_mechanism_with_options(published, tmp_path):
    """The reading is an option of the mechanism, published by default."""
    source, model = published
    target = tmp_path / "converted.safetensors"
    named = "resnet18+mrla_light:channels_per_head=32"
    result = run_forked("convert", source, target, "--model", named)
    assert result.returncode == 0, result.stderr
    assert f"tensors of {named}, reading 'published'" in result.stdout
    other = timm.create_model("resnet18_mrla_light", reading="published", num_classes=4)
    interlayer.load_weights(other, target)
    assert torch.equal(other.layer4[1].mrla.decay, model.layer4[1].mrla.decay)
    line = ("convert", source, tmp_path / "b.safetensors", "--model")
    assert "build it with reading='published'" in fails(*line, f"{named},reading=paper")
    assert "build it with reading='published'" in fails(*line, named, "--reading", "paper")
    assert "there is one reading of resnet18+eca" in fails(*line, "resnet18+eca", "--reading", "paper")


def test_plot_of_layer_scores_takes_a_mechanism_with_options(tmp_path):
    picture = tmp_path / "scores.png"
    plain = timm.create_model("preresnet20_cifar")
    interlayer.save_weights(plain, tmp_path / "plain.safetensors")
    line = ("plot", "layer-scores", NAMED, "--weights", tmp_path / "plain.safetensors", "--output", picture)
    result = run(*line)
    assert result.returncode == 0, result.stderr
    with Image.open(picture) as image:
        assert image.size[0] > 800
    assert "exists; give --overwrite" in fails(*line)
    plain_name = ("plot", "layer-scores", "preresnet20_cifar", "--output", tmp_path / "b.png")
    assert "has no layer attention attached" in fails(*plain_name)


def test_plot_of_scores_says_how_much_the_mechanism_contributes(tmp_path):
    plain = timm.create_model("preresnet20_cifar")
    interlayer.save_weights(plain, tmp_path / "plain.safetensors")
    picture = tmp_path / "scores.png"
    line = ("plot", "scores", "preresnet20_cifar+mrla_light", "--output", picture)
    result = run(*line, f"weights={tmp_path / 'plain.safetensors'}")
    assert result.returncode == 0, result.stderr
    assert "mrla_light changes the outputs of its blocks by 0% (1 image)" in result.stdout
    assert picture.stat().st_size > 5000
    assert "expected weights=FILE, got 'wieghts=a'" in fails(*line, "wieghts=a", "--overwrite")
    (tmp_path / "text.txt").write_text("no picture")
    sentence = fails(*line, "--overwrite", "--image", tmp_path / "text.txt")
    assert "text.txt cannot be used: it cannot be read as an image" in sentence


def test_profile_remarks_on_images_smaller_than_one_pixel_of_the_last_feature_map():
    """Such a cost says nothing about photographs; once for a backbone and what is attached to it."""
    result = run_forked("profile", "resnet10t+mrla_light", "--batch-size", 2, "--image-size", 16, "--steps", 1)
    assert result.returncode == 0, result.stderr
    assert "interlayer: resnet10t reduces images by a factor of 32: at 16 pixels its last feature map" in result.stderr
    assert result.stderr.count("reduces images") == 1


def test_unknown_commands_and_options():
    assert "No such command" in fails("trian")
    assert "No such option" in fails("models", "--colour")
