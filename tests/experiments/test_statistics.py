"""Statistics of a difference: pairs, intervals and the sentence that reports them."""

import statistics

import pytest

from interlayer.experiments import Difference, holm, paired_difference, seeds_needed, verdict
from interlayer.experiments.statistics import MANY_SEEDS, adjust, seeds_sentence
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
    assert (found.low, found.high) == (pytest.approx(0.0, abs=1e-9), pytest.approx(0.02))


def test_one_more_image_with_every_seed_is_noise_whatever_its_rounding():
    """The differences agree to the last bits, so that the test alone would be certain of any of them."""
    for images in (360, 1000, 10_000):
        for start in range(0, images - 8, images // 40):
            before = [(start + seed) / images for seed in (0, 3, 7)]
            after = [(start + seed + 1) / images for seed in (0, 3, 7)]
            assert paired_difference(before, after, resolution=1 / images).within_noise


def test_the_number_of_seeds_knows_of_the_other_tests():
    """Values of scipy.stats.nct with the level 5% / 7."""
    assert (seeds_needed(0.005), seeds_needed(0.005, tests=7)) == (10, 17)
    several = seeds_sentence([Difference(0.0, -0.01, 0.01, 1.0, spread=0.005)] * 7, ACCURACY, 3)
    assert several.startswith("14 more seeds would tell")


def test_only_a_fraction_of_images_changes_by_whole_images():
    accuracy = Metric("accuracy", percent=True, counts_images=True)
    miou = Metric("miou", percent=True)
    assert (accuracy.resolution(200), miou.resolution(200)) == (1 / 200, 0.0)


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


def test_the_p_value_is_that_of_the_paired_t_test():
    """By hand: t = 3 / sqrt(7 / 3), and with two degrees of freedom P(|T| > t) = 1 - t / sqrt(2 + t^2)."""
    found = paired_difference([0.0, 0.0, 0.0], [1.0, 2.0, 6.0])
    t = 3 / (7 / 3) ** 0.5
    assert found.p == pytest.approx(1 - t / (2 + t * t) ** 0.5)
    assert found.spread == pytest.approx(7**0.5)
    assert paired_difference([0.5, 0.5], [0.6, 0.6]).p == 0.0
    assert paired_difference([0.5, 0.5], [0.5, 0.5]).p == 1.0
    assert paired_difference([0.5], [0.6]).p is None


def test_a_difference_below_the_resolution_is_not_significant():
    """Otherwise Holm's correction would spend a rejection on it."""
    assert paired_difference([0.5, 0.6, 0.7], [0.51, 0.61, 0.71], resolution=0.0101).p == 1.0


def test_holms_correction_by_hand():
    """0.005 * 4 = 0.02, 0.01 * 3 = 0.03, 0.03 * 2 = 0.06, and 0.04 * 1 is raised to that of the one before it."""
    assert holm([0.04, 0.005, 0.03, 0.01]) == pytest.approx([0.06, 0.02, 0.06, 0.03])
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_a_difference_that_is_significant_alone_may_be_noise_among_others():
    """p = 0.03 alone, and 0.06 among two."""
    alone, clear = Difference(0.01, 0.001, 0.019, 0.03), Difference(0.05, 0.04, 0.06, 0.001)
    assert not alone.within_noise
    adjusted = adjust([alone, clear, Difference(0.2, None, None)])
    assert [each.adjusted_p for each in adjusted] == [pytest.approx(0.06), pytest.approx(0.003), None]
    assert [each.within_noise for each in adjusted] == [True, False, True]
    assert (adjusted[0].low, adjusted[0].high) == (alone.low, alone.high), "intervals stay individual"
    assert verdict("with", "plain", adjusted[0], ACCURACY, 3, 3) == (
        "with against plain: +1.00 points, within noise among 3 tests, p = 0.06 (95% interval +0.10 to +1.90, 3 "
        "seeds): these runs do not tell the two apart."
    )


@pytest.mark.parametrize(("effect", "seeds"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10), (2.0, 5)])
def test_the_number_of_seeds_is_that_of_power_tables(effect, seeds):
    """Known sample sizes of a paired t-test with a power of 80% at 5%, for a difference of so many deviations."""
    assert seeds_needed(0.01, effect * 0.01) == seeds


def test_the_number_of_seeds_has_limits():
    assert seeds_needed(0.0) == 2
    assert seeds_needed(1e-9) == 2
    assert seeds_needed(1.0) == MANY_SEEDS


def test_the_line_about_more_seeds():
    one = Difference(0.01, -0.01, 0.03, 0.2, None, 0.005)
    assert seeds_sentence([one], ACCURACY, 3) == (
        "7 more seeds would tell a difference of half a point with a power of 80%: paired differences spread by 0.50 "
        "points."
    )
    narrow = Difference(0.01, -0.01, 0.03, 0.2, None, 0.001)
    assert seeds_sentence([one], ACCURACY, 9).startswith("1 more seed would tell")
    assert "spread by up to 0.50 points" in seeds_sentence([narrow, one], ACCURACY, 9)
    assert seeds_sentence([narrow], ACCURACY, 4).startswith("4 seeds tell a difference of half a point")
    assert seeds_sentence([Difference(0.1, None, None)], ACCURACY, 1) == ""
    assert seeds_sentence([one], ERROR, 3) == "", "an error has no points"
    assert seeds_sentence([Difference(0, -1, 1, 1.0, None, 0.5)], ACCURACY, 3).startswith("More than 1,000 seeds would")
