"""Tests of a metric by the number of heads."""

import shutil
from pathlib import Path

import pytest
import timm
import torch
from digit_images import SMALL
from scipy import stats

import interlayer
from interlayer.analysis import HeadsPoint, attention_heads, plot_heads
from interlayer.experiments.heads import HeadsRun, find_runs, group_runs, heads_curve, heads_gains, read_heads_runs
from interlayer.tasks import Metric
from interlayer.training import TrainingError, train
from interlayer.training.recipe import from_values

ACCURACY = Metric("accuracy", percent=True)


@pytest.mark.parametrize(
    ("name", "options", "heads"),
    [
        ("vit_tiny_patch16_224", {}, 3),
        ("vit_tiny_patch16_224", {"num_heads": 12}, 12),
        ("vit_tiny_patch16_224+mrla_light", {"num_heads": 12}, 12),  # not those of layer attention
        ("swin_tiny_patch4_window7_224", {}, (2 * 3 + 2 * 6 + 6 * 12 + 2 * 24) / 12),
        ("rest_lite", {}, (1 + 2 + 4 + 8) / 4),
        ("resnet18+mrla_base:channels_per_head=16", {}, (4 + 8 + 16 + 32) / 4),
    ],
)
def test_heads_are_counted_in_the_network(name, options, heads):
    """The name of a network does not say how many heads it was built with."""
    backbone, _, mechanism = name.partition("+")
    with torch.device("meta"):
        model = timm.create_model(backbone, **options)
        if mechanism:
            mechanism, _, value = mechanism.partition(":channels_per_head=")
            interlayer.attach(model, mechanism, **({"channels_per_head": int(value)} if value else {}))
    assert attention_heads(model) == pytest.approx(heads)


def test_a_network_without_attention_has_no_heads():
    with pytest.raises(ValueError, match="ResNet has no attention"):
        attention_heads(timm.create_model("resnet10t"))


def run(heads, seed, value, model="vit", **settings):
    return HeadsRun(Path(f"{model}-{heads}-{seed}"), heads, seed, value, model, {"attach_options": {}, **settings})


def test_means_and_intervals_over_seeds():
    points = heads_curve([run(4, 0, 0.5), run(1, 0, 0.6), run(1, 1, 0.7), run(1, 2, 0.8)])
    interval = stats.t.interval(0.95, 2, 0.7, stats.sem([0.6, 0.7, 0.8]))
    assert [(point.heads, point.seeds) for point in points] == [(1, 3), (4, 1)]
    assert points[0].mean == pytest.approx(0.7)
    assert points[0].half_width == pytest.approx(interval[1] - 0.7)
    assert points[1] == HeadsPoint(4, 0.5, None, 1)


def test_groups_differ_in_everything_but_heads_and_seeds():
    """Runs of another recipe in one curve would be taken for an effect of the heads."""
    runs = [run(1, 0, 0.1), run(2, 0, 0.2), run(1, 0, 0.3, "vit+cb"), run(1, 1, 0.4), run(1, 0, 0.5, epochs=3)]
    runs = [HeadsRun(r.folder, r.heads, r.seed, r.value, r.model, {"epochs": 1, **r.settings}) for r in runs]
    groups = group_runs(runs)
    assert {name: [r.value for r in group] for name, group in groups.items()} == {
        "vit, epochs=1": [0.1, 0.2, 0.4], "vit+cb": [0.3], "vit, epochs=3": [0.5],
    }  # fmt: skip
    with pytest.raises(TrainingError, match="vit-1-0 and vit-1-0 have the same network and seed"):
        group_runs([run(1, 0, 0.1), run(1, 0, 0.2)])
    with pytest.raises(TrainingError, match=r"no two runs differ only in the number of heads \(got 1, 2\)"):
        group_runs([run(1, 0, 0.1), run(2, 0, 0.2, "vit+cb")])


def test_gains_are_paired_by_seed():
    name = "deit_tiny_patch16_224"
    plain = [run(1, 0, 0.1, name), run(1, 1, 0.5, name), run(2, 0, 0.3, name)]
    other = [run(1, 0, 0.2, f"{name}+cb"), run(1, 1, 0.6, f"{name}+cb"), run(4, 0, 0.3, f"{name}+cb")]
    (gains,) = heads_gains({"plain": plain, "cb": other}).values()
    assert len(gains) == 1, "there is no plain run with 4 heads"
    assert (gains[0].heads, gains[0].seeds) == (1, 2)
    assert gains[0].mean == pytest.approx(0.1)
    assert gains[0].half_width == pytest.approx(0, abs=1e-12)
    assert heads_gains({"plain": plain}) == {}


def test_the_figure_has_a_curve_per_network_and_differences_beside_it():
    points = [HeadsPoint(1, 0.5, 0.1, 3), HeadsPoint(2, 0.6, None, 1)]
    figure = plot_heads({"vit": points, "vit+cb": points[:1]}, ACCURACY, gains={"vit+cb": points[:1]})
    left, right = figure.axes
    assert "95% intervals" in figure.get_suptitle()
    wide = plot_heads({"vit": [HeadsPoint(1, 0.5, 0.9, 2)]}, ACCURACY).axes[0]
    assert wide.get_ylim() == (0, 100), "no accuracy is below zero"
    assert left.get_ylabel() == "accuracy [%]"
    assert [list(curve.lines[0].get_ydata()) for curve in left.containers] == [[50, 60], [50]]
    assert right.get_ylabel() == "difference to the plain network [points]"
    assert len(plot_heads({"vit": points}, ACCURACY).axes) == 1
    with pytest.raises(ValueError, match="no networks"):
        plot_heads({}, ACCURACY)


@pytest.fixture(scope="module")
def runs_of_two_heads(tmp_path_factory):
    """Runs of a transformer and of one with context broadcasting; those with two heads differ only in their recipe."""
    root = tmp_path_factory.mktemp("heads")
    for model in ("vit_tiny_patch16_224", "vit_tiny_patch16_224+cb"):
        options = {"embed_dim": 16, "depth": 2, "patch_size": 4, "num_heads": 1}
        values = {**SMALL, "model": model, "model_options": options, "epochs": 1, "batch_size": 512}
        train(from_values(values), root / "heads1" / model / "seed0")
    shutil.copytree(root / "heads1", root / "heads2")
    for path in (root / "heads2").glob("*/seed0/recipe.yaml"):
        assert "num_heads: 1" in path.read_text()
        path.write_text(path.read_text().replace("num_heads: 1", "num_heads: 2"))
    return root


def test_runs_are_found_and_grouped(runs_of_two_heads):
    assert len(find_runs([runs_of_two_heads])) == 4
    assert len(find_runs([runs_of_two_heads / "heads1", runs_of_two_heads])) == 4, "no run is counted twice"
    metric, runs = read_heads_runs([runs_of_two_heads])
    assert metric.percent
    groups = group_runs(runs)
    assert {name: [r.heads for r in group] for name, group in groups.items()} == {
        "vit_tiny_patch16_224": [1, 2], "vit_tiny_patch16_224+cb": [1, 2],
    }  # fmt: skip
    assert [point.heads for point in heads_gains(groups)["vit_tiny_patch16_224+cb"]] == [1, 2]
    with pytest.raises(TrainingError, match="holds no finished run"):
        find_runs([runs_of_two_heads / "heads1" / "vit_tiny_patch16_224" / "seed0" / "checkpoints"])
    with pytest.raises(TrainingError, match="no such folder"):
        find_runs([runs_of_two_heads / "absent"])


def test_runs_without_attention_say_so(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "plain")
    recipe = tmp_path / "plain" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("+mrla_light:channels_per_head=8", ""))
    with pytest.raises(TrainingError, match=r"plain: PreActResNet has no attention with a number of heads"):
        read_heads_runs([finished_run, tmp_path / "plain"])
