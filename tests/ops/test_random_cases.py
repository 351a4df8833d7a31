"""Tests of the program that compares the kernels of layer attention with float64 for random arguments."""

import sys
from pathlib import Path

import pytest
import torch
from operation_tester import DEVICE

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import layer_attention_cases as program

CASE = program.Case(0, "light_layer", 0, 0)
OPTIONS = CASE.options()


@pytest.mark.parametrize("operation", [name for name in program.KINDS if hasattr(program.ops, name)])
def test_a_case_compares_results_and_gradients(operation):
    """A case that raises an error or compares nothing would let a broken kernel pass."""
    small = [program.Case(number, operation, number, 0) for number in range(200)]
    case = min(small, key=lambda c: (lambda o: o["layers"] * o["channels"] * o["height"] * o["width"])(c.options()))
    _, errors = program.compare(case, DEVICE)
    assert {"output 0", "gradient of x 0", "gradient of value 0"} <= set(errors)
    assert max(fused for fused, _ in errors.values()) < 0.1


@pytest.mark.parametrize(
    ("errors", "good"),
    [((1e-3, 6e-4), True), ((1e-3, 4e-4), False), ((float("inf"), 1e-3), False), ((float("nan"), 1e-3), False)],
)
def test_the_verdict_is_twice_the_error_of_the_reference(errors, good, capsys):
    """A kernel with a missing gradient (inf) or NaN must not pass either."""
    assert program.report([(CASE, OPTIONS, {"gradient of x 0": errors})]) is good


def test_one_unlucky_case_decides_nothing():
    """One ReLU that jumps in one case of twenty is no fault, errors that are three times those of the reference are."""
    rest = [(1e-3, 8e-4), (8e-4, 1e-3)] * 10
    assert verdict([*rest, (0.5, 1e-5)])
    assert not verdict([(3 * other, other) for _, other in rest])


@pytest.mark.parametrize(("wrong", "count"), [(3, 39), (2, 18), (1, 6)])
def test_kernels_that_are_wrong_for_some_shapes_do_not_pass(wrong, count):
    """A variant of a kernel is a few of the cases of its operation."""
    assert not verdict([(0.5, 5e-3)] * wrong + [(5e-3, 5e-3)] * count)
    assert not verdict([(0.175, 5e-3)] * (8 * wrong) + [(5e-3, 5e-3)] * (8 * count))


def test_better_cases_do_not_make_up_for_worse_ones():
    assert not verdict([(2e-1, 2e-3), (4e-6, 2e-3)] * 10)


def verdict(pairs):
    return program.report([(CASE, OPTIONS, {"gradient of x 0": pair}) for pair in pairs])


def test_what_vanishes_is_rounding_of_the_dtype(capsys):
    """A gradient that is zero, and that the kernels compute to the precision of the dtype, is no fault."""
    low = OPTIONS | {"dtype": torch.float16}
    errors = {"vanishing gradient of norm_weight 0": (3e-5, 0.0)}
    assert program.report([(CASE, low, errors)])
    assert not program.report([(CASE, OPTIONS | {"dtype": torch.float32}, errors)])
