"""`interlayer plot`: the commands about layers."""

import shutil

import pytest
from command_line import fails, run_forked
from digit_images import SMALL
from PIL import Image

from interlayer.training import train
from interlayer.training.recipe import from_values


@pytest.fixture(scope="module")
def deeper_run(tmp_path_factory):
    """A run of a network with three layers in each stage."""
    folder = tmp_path_factory.mktemp("deeper") / "run"
    options = {**SMALL["model_options"], "blocks": 3}
    model = "preresnet20_cifar+mrla_light:channels_per_head=8"
    train(from_values({**SMALL, "epochs": 1, "model": model, "model_options": options}), folder)
    return folder


@pytest.fixture
def drawn(tmp_path):
    """Runs a command that has to write a figure, and returns what it prints."""

    def run(*arguments):
        picture = tmp_path / "figure.png"
        result = run_forked("plot", *arguments, "--output", picture, "--overwrite")
        assert result.returncode == 0, result.stderr
        with Image.open(picture) as image:
            assert min(image.size) > 300
        return " ".join(result.stdout.split())

    return run


def test_queries_of_a_run_use_images_of_every_class(drawn, deeper_run, tmp_path):
    printed = drawn("queries", deeper_run, "--per-class", "2")
    assert "stages.1.1" in printed
    assert "stages.1.0" not in printed, "the first layer of a stage has no predecessor"
    existing = tmp_path / "figure.png"
    assert "exists; give --overwrite" in fails("plot", "queries", deeper_run, "--output", existing)
    other = ("--output", tmp_path / "other.png")
    assert "has no layer attention attached" in fails("plot", "queries", "preresnet20_cifar", *other)
    assert not (tmp_path / "other.png").exists()


def test_sharing_says_which_layers_could(drawn, deeper_run):
    printed = drawn("sharing", deeper_run, "--threshold", "100")
    assert "stages.0.2" in printed
    assert "3 of 3 layers differ from the layer before by at most 100 nats" in printed
    assert "0 of 3 layers" in drawn("sharing", deeper_run, "--threshold", "0")


def test_flops_by_size_names_what_is_left_out(drawn, tmp_path):
    printed = drawn("flops", "mixer_s32_224+cb", "--sizes", "16,64,96,128")
    assert "mixer_s32_224+cb adds 0 multiply-adds per pixel" in printed, "averages are not counted"
    other = ("--output", tmp_path / "other.png")
    assert "--sizes takes whole numbers" in fails("plot", "flops", "resnet10t", "--sizes", "64;32", *other)
    assert "--convention must be torch or paper" in fails("plot", "flops", "resnet10t", "--convention", "mine", *other)
    assert "unknown model 'resnet19'" in fails("plot", "flops", "resnet19", *other)
    result = run_forked("plot", "flops", "mixer_s32_224", "--sizes", "16,64", *other)
    assert "mixer_s32_224 at 16 pixels is left out: " in result.stderr


def test_depth_says_how_the_cost_grows(drawn, tmp_path):
    small = ("--depths", "4,2", "--batch-size", "1", "--channels", "32", "--map-size", "4", "--steps", "1")
    printed = drawn("depth", "mrla_base", *small)
    assert "plain: time of a step grows with T^" in printed
    assert "mrla_base: time of a step grows with T^" in printed
    other = ("--output", tmp_path / "other.png", *small)
    assert "unknown mechanism 'mrla_lite'" in fails("plot", "depth", "mrla_lite", *other)
    assert "--depths takes whole numbers" in fails("plot", "depth", *other, "--depths", "two")
    assert "at least two blocks, got 1" in fails("plot", "depth", *other, "--depths", "1")
    assert not (tmp_path / "other.png").exists()


def test_heads_of_runs(drawn, tmp_path, deeper_run):
    """The second run differs only in its recipe, so that both have the same accuracy."""
    options = {"embed_dim": 16, "depth": 1, "patch_size": 4, "num_heads": 1}
    values = {**SMALL, "model": "vit_tiny_patch16_224", "model_options": options, "epochs": 1, "batch_size": 512}
    train(from_values(values), tmp_path / "runs" / "one")
    shutil.copytree(tmp_path / "runs" / "one", tmp_path / "runs" / "four")
    recipe = tmp_path / "runs" / "four" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("num_heads: 1", "num_heads: 4"))
    printed = drawn("heads", tmp_path / "runs")
    assert printed.count("vit_tiny_patch16_224") == 2
    assert "│ 1 │" in printed
    assert "│ 4 │" in printed
    other = ("--output", tmp_path / "other.png")
    assert "no two runs differ only in the number of heads (got 1.33333)" in fails("plot", "heads", deeper_run, *other)


def test_scores_of_one_stage_and_of_every_head(drawn, tmp_path, deeper_run):
    assert "images)" in drawn("scores", deeper_run, "--head", "all")
    drawn("scores", deeper_run, "--stage", "3", "--stage", "1", "--head", "0")
    other = ("--output", tmp_path / "other.png")
    assert "--stage must be from 1 to 3, got 4" in fails("plot", "scores", deeper_run, "--stage", "4", *other)
    assert "--head takes the number of a head, from 0, or all" in fails(
        "plot", "scores", deeper_run, "--head", "x", *other
    )
    assert "head must be from 0 to 1, got 2" in fails(
        "plot", "scores", deeper_run, "--stage", "3", "--head", "2", *other
    )
    assert not (tmp_path / "other.png").exists()
