"""Tests of lines and exponents."""

import pytest

from interlayer.analysis import exponent, linear_fit


def test_a_line_by_hand():
    line = linear_fit([0, 1, 2], [1.0, 3.0, 5.0])
    assert (line.slope, line.intercept, line.r_squared) == pytest.approx((2, 1, 1))
    assert line.at(10) == pytest.approx(21)
    line = linear_fit([0, 1, 2, 3], [0.0, 1.0, 1.0, 0.0])
    assert (line.slope, line.intercept, line.r_squared) == pytest.approx((0, 0.5, 0))
    assert linear_fit([1, 2], [3.0, 3.0]).r_squared == 1


def test_exponents_of_power_laws():
    assert exponent([2, 4, 8], [5 * n**1.5 for n in (2, 4, 8)]) == pytest.approx(1.5)
    assert exponent([1, 2], [8.0, 4.0]) == pytest.approx(-1)


@pytest.mark.parametrize("fit", [linear_fit, exponent])
def test_too_few_points_are_an_error(fit):
    with pytest.raises(ValueError, match="two points with different x"):
        fit([2, 2], [1.0, 3.0])
    with pytest.raises(ValueError, match="positive values"):
        exponent([1, 2], [0.0, 3.0])
