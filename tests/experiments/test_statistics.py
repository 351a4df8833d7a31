"""Statistics of a difference: pairs, intervals and the sentence that reports them."""

import statistics

import pytest

from interlayer.experiments import Difference, paired_difference, verdict
from interlayer.tasks import Metric

ACCURACY = Metric("accuracy", percent=True)
ERROR = Metric("mean_error", higher_is_better=False)


def words(difference, seeds=3, metric=ACCURACY):
    return verdict("with", "plain", difference, metric, seeds)


def test_the_interval_is_students():
    """Computed by hand: differences 1, 2, 6 have mean 3 and standard deviation sqrt(7), and t(2, 97.5%) = 4.3027."""
    found = paired_difference([0.0, 0.0, 0.0], [1.0, 2.0, 6.0])
    reach = 4.302653 * statistics.stdev([1, 2, 6]) / 3**0.5
    assert (found.mean, found.low, found.high) == (3.0, pytest.approx(3 - reach), pytest.approx(3 + reach))


def test_an_interval_is_never_narrower_than_one_test_image():
    """One additional correct image for each of three seeds is not significant."""
    found = paired_difference([0.5, 0.6, 0.7], [0.51, 0.61, 0.71], resolution=0.01)
    assert (found.low, found.high) == (pytest.approx(0.0), pytest.approx(0.02))


def test_pairs_cancel_what_seeds_share():
    """Seeds that differ widely but agree on the difference give a narrow interval."""
    found = paired_difference([0.1, 0.5, 0.9], [0.11, 0.511, 0.909])
    assert not found.within_noise
    assert found.high - found.low < 0.01


def test_words_are_honest():
    noise = words(Difference(0.004, -0.01, 0.018))
    assert "within noise" in noise
    assert "better" not in noise
    assert "+0.40 points" in noise
    assert words(Difference(0.02, 0.01, 0.03)).startswith("with is better than plain by 2.00 points")
    assert "worse" in words(Difference(-0.02, -0.03, -0.01))
    assert "says nothing about noise" in words(Difference(0.02, None, None), 1)


def test_the_sentences_of_a_classifier():
    assert words(Difference(0.004, -0.01, 0.018)) == (
        "with against plain: +0.40 points, within noise (95% interval -1.00 to +1.80, 3 seeds): these runs do not tell "
        "the two apart."
    )
    assert words(Difference(-0.02, -0.03, -0.01), 5) == (
        "with is worse than plain by 2.00 points (95% interval -3.00 to -1.00, 5 seeds)."
    )
    assert words(Difference(0.02, None, None), 1) == (
        "with against plain: +2.00 points with one seed, which says nothing about noise: use more."
    )


def test_better_is_what_the_metric_says():
    """For an error, lower is better, and differences are not in points."""
    assert words(Difference(-0.02, -0.03, -0.01), metric=ERROR) == (
        "with is better than plain by 0.0200 in mean error (95% interval -0.0300 to -0.0100, 3 seeds)."
    )
    assert "worse" in words(Difference(0.02, 0.01, 0.03), metric=ERROR)
    assert "+0.0200 in mean error, within noise" in words(Difference(0.02, -0.01, 0.03), metric=ERROR)
