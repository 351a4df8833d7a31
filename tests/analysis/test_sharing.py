"""Tests of the divergence between the scores of consecutive layers."""

import math

import pytest
import timm
import torch

import interlayer
from interlayer.analysis import StageScores, plot_score_sharing, score_divergence, score_sharing


def matrix(*rows):
    """Scores of one image and one head."""
    size = len(rows)
    return torch.tensor([[*row, *[0.0] * (size - len(row))] for row in rows])[None, None]


def test_divergence_by_hand():
    """Rows over common layers: (0.5, 0.5) and (0.25, 0.75) of the third layer; the fourth reads like the third."""
    scores = matrix([1.0], [0.5, 0.5], [0.125, 0.375, 0.5], [0.1, 0.3, 0.4, 0.2])
    found = score_divergence(scores)
    assert found.isnan().tolist() == [True, True, False, False], "two layers have only one layer in common"
    assert float(found[2]) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert float(found[3]) == pytest.approx(0.0, abs=1e-6), "the same proportions, and a new layer in addition"


def test_divergence_is_the_mean_over_images_and_heads_not_that_of_the_mean():
    """Two heads that swap their preferences have the same mean scores, and differ nevertheless."""
    one, other = matrix([1.0], [0.9, 0.1], [0.05, 0.45, 0.5]), matrix([1.0], [0.1, 0.9], [0.45, 0.05, 0.5])
    expected = 0.1 * math.log(0.1 / 0.9) + 0.9 * math.log(0.9 / 0.1)
    assert float(score_divergence(torch.cat((one, other), dim=1))[2]) == pytest.approx(expected)
    assert float(score_divergence(torch.cat((one, other), dim=0))[2]) == pytest.approx(expected)


def test_a_score_that_underflows_does_not_make_the_divergence_infinite():
    scores = torch.cat((matrix([1.0], [1.0, 0.0], [0.5, 0.3, 0.2]), matrix([1.0], [0.5, 0.5], [0.5, 0.3, 0.2])), dim=1)
    assert 0 < float(score_divergence(scores)[2]) < 20


def test_a_layer_that_is_read_with_a_weight_of_zero_is_not_left_out():
    """Otherwise layers that attend to different ones would seem to attend alike."""
    zero, small = (matrix([1.0], [0.3, 0.7], [w, 0.5, 0.5], [0.9, 0.05, 0.03, 0.02]) for w in (0.0, 1e-30))
    assert float(score_divergence(zero)[3]) == pytest.approx(float(score_divergence(small)[3]))
    assert float(score_divergence(zero)[3]) > 10
    read = torch.ones(4, 4).tril() > 0
    read[2:, 0] = False
    expected = 0.625 * math.log(0.625 / 0.5) + 0.375 * math.log(0.375 / 0.5)
    assert float(score_divergence(zero, read)[3]) == pytest.approx(expected), "a layer that is not read is left out"
    assert not score_divergence(matrix([1.0], [0.0, 1.0], [0.0, 0.0, 1.0]))[2].isnan(), "nothing is divided by zero"


def attached(mechanism, **options):
    model = timm.create_model("resnet10t", block_args={}, num_classes=5, layers=(3, 1, 4, 1))
    return interlayer.attach(model, mechanism, image_size=64, **options)


@pytest.fixture
def images():
    return torch.randn(2, 3, 64, 64)


@pytest.mark.parametrize("mechanism", ["mrla_light", "mrla_base"])
def test_stages_with_three_layers_are_compared(mechanism, images):
    stages = score_sharing(interlayer.layer_scores(attached(mechanism), images))
    assert [stage.blocks for stage in stages] == [("layer1.2",), ("layer3.2", "layer3.3")]
    assert all(divergence >= 0 for stage in stages for divergence in stage.divergences)
    figure = plot_score_sharing({"network": stages}, threshold=0.1)
    bars = figure.axes[0].patches
    assert [bar.get_height() for bar in bars] == [value for stage in stages for value in stage.divergences]
    assert figure.axes[0].get_yscale() == "linear"
    assert plot_score_sharing({"network": stages}, threshold=1e-9).axes[0].get_yscale() == "log", "the line is visible"
    filled = [bar.get_facecolor()[3] > 0 for bar in bars]
    assert filled == [value <= 0.1 for stage in stages for value in stage.divergences]


def test_light_shares_if_lambda_is_uniform(images):
    """Eq. 8 with a lambda that is equal in all channels: both layers weight earlier layers in the same proportions."""
    model = attached("mrla_light")
    for layer in range(4):
        torch.nn.init.constant_(model.layer3[layer].mrla.decay, -0.5)
    stage = score_sharing(interlayer.layer_scores(model, images))[1]
    assert stage.divergences == pytest.approx((0.0, 0.0), abs=1e-6)
    assert stage.shared(0.01) == ["layer3.2", "layer3.3"] or stage.shared(0.01) == ["layer3.3", "layer3.2"]
    assert stage.shared(-1.0) == []


def test_what_cannot_be_compared_is_said(images):
    published = interlayer.layer_scores(attached("mrla_light", reading="published"), images)
    with pytest.raises(ValueError, match="no layer has two layers in common with the layer before"):
        score_sharing(published)
    with pytest.raises(ValueError, match="no layer has two layers in common"):
        score_sharing([StageScores("a to b", ("a", "b"), matrix([1.0], [0.5, 0.5]))])
