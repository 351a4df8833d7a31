"""The table of perturbations, and batches of images of different sizes."""

import pytest
import torch

from interlayer.analysis import PERTURBATIONS, PerturbedScore, RobustnessPanel, parse_perturbations, plot_robustness
from interlayer.analysis.robustness import Inputs, as_pictures
from interlayer.tasks import Metric

ROWS = list(PERTURBATIONS.values())


def inputs(images, sizes=None, seed=0):
    weights = torch.linspace(-1, 1, images[0].numel()).view(images.shape[1:])
    return Inputs(
        images,
        sizes or [tuple(images.shape[-2:])] * len(images),
        range(seed, seed + len(images)),
        torch.tensor([0.5, 0.4, 0.3]),
        lambda x: (x * weights).sum(),
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_perturbs_and_says_whether_it_is_random(row):
    images = torch.rand(2, 3, 12, 12)
    for strength in row.strengths:
        first, again, other = (row.apply(inputs(images, seed=seed), strength) for seed in (0, 0, 7))
        assert first.shape == images.shape
        assert first.min() >= 0
        assert first.max() <= 1
        assert not torch.equal(first, images)
        assert torch.equal(first, again)
        if row.name != "pgd":  # on a linear loss, it reaches the same corner from every start
            assert torch.equal(first, other) == (not row.random)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_stronger_is_further_from_the_image(row):
    images = torch.rand(2, 3, 24, 24)
    row = row.with_strengths((0.2, 0.4, 0.8)) if len(row.strengths) == 1 else row
    distances = [float((row.apply(inputs(images), s) - images).abs().sum()) for s in row.strengths]
    assert distances == sorted(distances)
    assert distances[0] > 0


@pytest.mark.parametrize("row", [row for row in ROWS if not row.attacks], ids=lambda row: row.name)
def test_padding_is_no_part_of_an_image(row):
    """An image in a padded batch is perturbed as it is alone: the center is its own, and no padding is blurred in."""
    images = torch.rand(2, 3, 12, 16)
    images[0, :, 8:], images[0, :, :, 10:] = 0, 0
    strength = row.strengths[0]
    perturbed = row.apply(inputs(images, [(8, 10), (12, 16)]), strength)
    torch.testing.assert_close(perturbed[0, :, :8, :10], row.apply(inputs(images[:1, :, :8, :10]), strength)[0])
    assert perturbed[0, :, 8:].sum() == 0
    torch.testing.assert_close(perturbed[1:], row.apply(inputs(images[1:], seed=1), strength))


def test_strengths_are_those_of_the_papers():
    """CB, Section 4.6 and Table 9; make_imagenet_c.py, whose noise is on the scale from 0 to 1."""
    assert PERTURBATIONS["occlusion"].strengths == (112 / 224,)
    assert PERTURBATIONS["gaussian_noise"].strengths[:2] == (5, 10)
    severities = [strength / 255 for strength in PERTURBATIONS["gaussian_noise"].strengths[2:]]
    assert severities == pytest.approx([0.08, 0.12, 0.18, 0.26, 0.38])
    assert PERTURBATIONS["shot_noise"].strengths == (60, 25, 12, 5, 3)
    assert PERTURBATIONS["gaussian_blur"].strengths == (1, 2, 3, 4, 6)


def test_a_strength_is_in_the_unit_of_its_label():
    black = torch.full((1, 3, 4, 4), 0.5)
    for name in ("fgsm", "pgd"):
        change = PERTURBATIONS[name].apply(inputs(black), 2.0) - black
        assert change.abs().max() == pytest.approx(2 / 255, abs=1e-6)
        assert PERTURBATIONS[name].label(2.0) == "epsilon 2/255"
    noise = PERTURBATIONS["gaussian_noise"].apply(inputs(torch.full((1, 3, 100, 100), 0.5)), 10.0) - 0.5
    assert noise.std() == pytest.approx(10 / 255, rel=0.02)
    gray = PERTURBATIONS["gray_occlusion"].apply(inputs(black), 0.5)
    torch.testing.assert_close(gray[0, :, 1, 1], torch.tensor([0.5, 0.4, 0.3]))


def test_perturbations_are_parsed():
    assert parse_perturbations([]) == ROWS
    fgsm, blur = parse_perturbations(["fgsm=0.5,2", "gaussian_blur"])
    assert (fgsm.name, fgsm.strengths) == ("fgsm", (0.5, 2.0))
    assert blur is not None
    assert blur == PERTURBATIONS["gaussian_blur"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (["fog"], "unknown perturbation 'fog'; expected one of occlusion, "),
        (["fgsm=much"], "expected fgsm=STRENGTH,STRENGTH with numbers, got 'fgsm=much'"),
        (["fgsm="], "expected fgsm=STRENGTH,STRENGTH with numbers"),
        (["fgsm=-1"], "strengths of fgsm above 0 and at most 255, got -1"),
        (["occlusion=2"], "strengths of occlusion above 0 and at most 1, got 2"),
        (["shot_noise=inf"], "strengths of shot_noise above 0, got inf"),
        (["shot_noise=nan"], "strengths of shot_noise above 0, got nan"),
        (["pgd", "pgd=1"], "pgd is given twice"),
    ],
)
def test_wrong_perturbations_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_perturbations(text)


def test_the_plot_has_a_panel_for_each_perturbation_and_a_line_for_each_network():
    def score(mean, width=None):
        return PerturbedScore((mean,), mean, width)

    panels = [
        RobustnessPanel("noise", "sigma", (1, 2), {"a": [score(0.6, 0.1), score(0.4)], "b": [score(0.5), score(0.2)]})
    ] * 5
    figure = plot_robustness(panels, {"a": score(0.9), "b": score(0.8)}, Metric("accuracy", percent=True))
    assert len(figure.axes) == 5
    axes = figure.axes[0]
    assert [line.get_text() for line in axes.get_xticklabels()] == ["none", "1", "2"]
    assert list(axes.containers[0].lines[0].get_ydata()) == [0.9, 0.6, 0.4]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    with pytest.raises(ValueError, match="no perturbations"):
        plot_robustness([], {}, Metric("accuracy"))


def test_pictures_are_bytes_with_channels_last():
    picture = as_pictures(torch.tensor([0.0, 0.5, 1.2]).view(1, 3, 1, 1))
    assert picture.tolist() == [[[[0, 128, 255]]]]
