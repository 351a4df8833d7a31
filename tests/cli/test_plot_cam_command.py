"""Tests of `interlayer plot cam`."""

import sys

import numpy as np
import pytest
from command_line import fails, run_forked
from PIL import Image


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    for index, size in enumerate([(40, 40), (64, 48)]):
        pixels = np.random.default_rng(index).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"photo{index}.png")
    return folder


def test_a_figure_of_networks_layers_and_methods(photographs, tmp_path):
    """A model without weights beside one with a mechanism: 2 x 2 x 2 columns, and the layer of each is printed."""
    picture = tmp_path / "cam.png"
    networks = ("preresnet20_cifar", "preresnet20_cifar+mrla_light")
    line = ("plot", "cam", *networks, "--image", photographs, "--method", "grad_cam,group_cam", "--layer", "2,stage3")
    result = run_forked(*line, "--groups", 4, "--target", 7, "--output", picture)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "", "no progress bar of another package, and no bar in a file"
    lines = result.stdout.splitlines()
    assert len(lines) == 9
    assert "preresnet20_cifar, untrained: Grad-CAM of stages.1.2, 16 x 16" in lines
    assert "preresnet20_cifar+mrla_light, untrained: Group-CAM of stages.2.2, 8 x 8" in lines
    assert Image.open(picture).width > Image.open(picture).height
    assert "exists; give --overwrite" in fails(*line, "--output", picture)


def test_the_network_of_a_run_and_its_classes(finished_run, tmp_path):
    """Without --image, test images of the run are drawn; classes have the names of the run."""
    picture = tmp_path / "cam.png"
    line = ("plot", "cam", finished_run, "--output", picture, "--method", "score_cam", "--channels", 8)
    result = run_forked(*line, "--target", "3")
    assert result.returncode == 0, result.stderr
    assert "Score-CAM of" in result.stdout
    assert picture.is_file()
    message = fails("plot", "cam", finished_run, "--output", tmp_path / "b.png", "--target", "eleven")
    assert "'eleven' is no class of the network: expected a class such as" in message
    assert not (tmp_path / "b.png").exists()


def test_a_class_that_is_misspelled_gets_the_nearest_ones(tmp_path):
    line = ("plot", "cam", "mobilenetv3_small_050", "--output", tmp_path / "cam.png")
    message = fails(*line, "--target", "taby")
    assert "mobilenetv3_small_050, untrained: 'taby' is no class of the network" in message
    assert "expected a class such as tabby" in message
    assert "0 to 999" in message
    assert "'1000' is no class" in fails(*line, "--target", "1000")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "gradcam"), "unknown method 'gradcam': expected one of grad_cam"),
        (("--channels", "8"), "--channels is for score_cam"),
        (("--groups", "8", "--method", "score_cam"), "--groups is for group_cam"),
        (("--layer", "stage9"), "stage 9 does not exist"),
        (("--layer", "stages.7"), "has no module 'stages.7': the nearest names are"),
        (("--image", "missing.jpg"), "missing.jpg"),
        (("--output", "nowhere/cam.png"), "nowhere: no such folder"),
    ],
)
def test_bad_options(options, message, tmp_path):
    assert message in fails("plot", "cam", "preresnet20_cifar", *options, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_pytorch_grad_cam(monkeypatch, tmp_path):
    """The command says what to install, in one sentence."""
    from interlayer_cli.app import main

    monkeypatch.setitem(sys.modules, "pytorch_grad_cam", None)
    monkeypatch.setattr(sys, "argv", ["interlayer", "plot", "cam", "preresnet20_cifar", "--output", "cam.png"])
    monkeypatch.chdir(tmp_path)
    messages = []
    monkeypatch.setattr("typer.echo", lambda text, **options: messages.append(text))
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert 'pip install "interlayer[cam]"' in messages[-1]
