"""Tests of the commands that plot attention."""

import pytest
from command_line import fails, run_forked
from dense_data import small_recipe, write_label_maps, write_objects
from PIL import Image

from interlayer.analysis import query_attention
from interlayer.experiments import load_network, whole_image
from interlayer.training import train
from interlayer_cli.plot.attention import parse_heads, parse_layer, parse_query

SMALL = ("image_size=32", "model_options.patch_size=8", "model_options.depth=2", "model_options.img_size=32")
VIT = "vit_tiny_patch16_224"


@pytest.mark.parametrize(
    ("command", "networks"),
    [
        ("entropy", (VIT, f"{VIT}+cb")),
        ("distance", (VIT, "--per-query")),
        ("jacobian", (VIT,)),
        ("broadcast-scales", (f"{VIT}+cb:scaled=true",)),
        ("attention", (VIT, f"{VIT}+cb", "--query", "80%,20%", "--layer", "1", "--heads", "0,2")),
    ],
)
def test_a_figure_is_drawn(command, networks, tmp_path):
    """Without weights and images: random networks on a sample photograph."""
    picture = tmp_path / "figure.png"
    result = run_forked("plot", command, *SMALL, *networks, "--output", picture)
    assert result.returncode == 0, result.stderr
    assert f"drawn in {picture}" in result.stdout.replace("\n", "")
    with Image.open(picture) as image:
        assert min(image.size) > 300
    again = fails("plot", command, *SMALL, *networks, "--output", picture)
    assert "exists; give --overwrite to replace it" in again


@pytest.mark.slow
@pytest.mark.parametrize("task", ["segment", "detect"])
def test_runs_that_segment_or_detect_are_drawn_with_the_whole_image(task, tmp_path):
    """The figure has the aspect ratio of a wide photograph, which is not cropped to a square."""
    (write_label_maps if task == "segment" else write_objects)(tmp_path / "data")
    train(small_recipe(task, tmp_path / "data", model="pvt_v2_b0"), tmp_path / "run")
    Image.new("RGB", (120, 40), "red").save(tmp_path / "wide.png")
    loaded = load_network(str(tmp_path / "run"))
    shown = whole_image(loaded, tmp_path / "wide.png")
    assert shown.pictures.shape == (1, 3, 40, 120)
    assert whole_image(loaded).pictures.shape == (1, 3, 48, 64), "the first test image"
    line = ("plot", "attention", tmp_path / "run", "--image", tmp_path / "wide.png", "--layer", "stages.1.blocks.0")
    result = run_forked(*line, "--output", tmp_path / "figure.png")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    found = query_attention(loaded.network, shown.inputs, layer=0, forward=loaded.task.forward)
    height, width = found.grid
    assert found.frame[0] * height * 3 == pytest.approx(found.frame[1] * width, rel=0.1), "as wide as the image"


def test_heads_of_rest_are_drawn(tmp_path):
    line = ("plot", "emsa-heads", "rest_lite", "image_size=32", "--output", tmp_path / "heads.png")
    result = run_forked(*line, "--layer", "stages.2")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "heads.png").is_file()
    message = fails(*line, "--overwrite", "--layer", "stages.0")
    assert "rest_lite, untrained: the network has no attention in 'stages.0'" in message


def test_what_cannot_be_drawn_is_said_in_one_sentence(tmp_path):
    output = ("--output", tmp_path / "figure.png")
    assert "resnet18, untrained: ResNet has no spatial attention" in fails("plot", "entropy", "resnet18", *output)
    message = fails("plot", "broadcast-scales", *SMALL, VIT, *output)
    assert "has no scaled context broadcasting: attach it as cb:scaled=true" in message
    assert "has heads from 0 to 2, got 7" in fails("plot", "attention", *SMALL, VIT, "--heads", "7", *output)
    assert "--scale is shared or own" in fails("plot", "attention", VIT, "--scale", "both", *output)
    message = fails("plot", "attention", *SMALL, VIT, "--layer", "40", *output)
    assert f"{VIT}, untrained: there is no such layer: the network has 2 attentions" in message
    broken = tmp_path / "photo.jpg"
    broken.write_text("no image")
    assert "photo.jpg cannot be used" in fails("plot", "attention", *SMALL, VIT, "--image", broken, *output)
    assert not (tmp_path / "figure.png").exists()


def test_queries_layers_and_heads_are_read():
    assert parse_query(None) == {}
    assert parse_query("class") == {"query": "class"}
    assert parse_query("7, 4") == {"query": (7, 4)}
    assert parse_query("50%,12.5%") == {"at": (0.5, 0.125)}
    for text in ("7", "7%,4", "1.5,2", "left", "-1,2"):
        with pytest.raises(ValueError, match="--query is ROW,COLUMN such as 7,4"):
            parse_query(text)
    assert [parse_layer(text) for text in ("1", "12", "-1", "blocks.3")] == [0, 11, -1, "blocks.3"]
    with pytest.raises(ValueError, match="--layer counts attentions from 1"):
        parse_layer("0")
    assert [parse_heads(text) for text in (None, "mean", "0, 2,5")] == [None, "mean", [0, 2, 5]]
    with pytest.raises(ValueError, match="--heads is a list of heads"):
        parse_heads("first")


def test_a_figure_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path):
    """The network does not exist, so that an error about the figure shows that it came first."""
    nothing = ("plot", "entropy", "no_such_network", "--overwrite", "--output")
    assert f"{tmp_path} is a folder" in fails(*nothing, tmp_path)
    assert "figure.txt cannot be drawn: the name of a figure ends in one of ." in fails(
        *nothing, tmp_path / "figure.txt"
    )
    assert "no such folder" in fails(*nothing, tmp_path / "missing" / "figure.png")
    assert not any(tmp_path.iterdir())
