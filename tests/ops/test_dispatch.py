"""Tests of the selection of implementations and their limits."""

import os
import subprocess
import sys

import pytest
import torch

import interlayer
from interlayer.ops import dispatch
from interlayer.ops.dispatch import Implementation, Operation, backends


@pytest.fixture
def doubled():
    """Create an operation with a kernel that supports only even lengths; the result identifies the implementation."""

    def unsupported_reason(x):
        return None if len(x) % 2 == 0 else f"needs an even length, got {len(x)}"

    implementation = Implementation("even", lambda x: ("even", x + x), unsupported_reason)
    yield Operation("twice_for_a_test", lambda x: ("reference", 2 * x), [implementation])
    del dispatch._OPERATIONS["twice_for_a_test"]


def test_auto_takes_the_kernel_where_it_can_and_the_reference_beyond_its_limits(doubled):
    assert doubled(torch.ones(4))[0] == "even"
    assert doubled(torch.ones(5))[0] == "reference"


def test_a_kernel_asked_for_by_name_runs_or_says_why_not(doubled):
    with interlayer.backend("even"):
        assert doubled(torch.ones(4))[0] == "even"
        with pytest.raises(ValueError, match="'even' cannot compute twice_for_a_test: needs an even length, got 5"):
            doubled(torch.ones(5))


def test_reference_can_be_forced_and_the_choice_ends_with_the_block(doubled):
    with interlayer.backend("reference"):
        assert doubled(torch.ones(4))[0] == "reference"
    assert doubled(torch.ones(4))[0] == "even"
    with pytest.raises(RuntimeError), interlayer.backend("reference"):
        raise RuntimeError
    assert doubled(torch.ones(4))[0] == "even"


def test_implementations_are_tried_in_the_order_of_the_list():
    names = ["first", "second", "third"]
    implementations = [
        Implementation(name, lambda x, name=name: name, lambda x, n=n: None if x >= n else "too small")
        for n, name in zip((3, 2, 1), names, strict=True)
    ]
    operation = Operation("ordered_for_a_test", lambda x: "reference", implementations)
    try:
        assert [operation(x) for x in (3, 2, 1, 0)] == ["first", "second", "third", "reference"]
        with interlayer.backend("third"):
            assert operation(3) == "third"
    finally:
        del dispatch._OPERATIONS["ordered_for_a_test"]


def test_a_step_of_a_backward_pass_is_not_strict():
    """If an implementation that is not strict is chosen by name and unsupported, the reference runs."""
    implementation = Implementation("never", lambda x: "never", lambda x: "never supported", strict=False)
    operation = Operation("lenient_for_a_test", lambda x: "reference", [implementation])
    try:
        with interlayer.backend("never"):
            assert operation(1) == "reference"
    finally:
        del dispatch._OPERATIONS["lenient_for_a_test"]


def test_without_triton_the_other_implementations_remain():
    program = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find_spec(name, *rest)
from interlayer.ops.dispatch import backends
from interlayer.ops import residual_end
assert "triton" not in backends(), backends()
assert [i.name for i in residual_end.implementations] == ["scaled", "recompute"]
assert not any(name.startswith("interlayer.ops._triton.") for name in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_unknown_backend_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown backend 'cuda', expected one of auto, reference"):
        interlayer.backend("cuda").__enter__()
    assert backends()[:2] == ["auto", "reference"]


@pytest.mark.parametrize(("value", "code"), [("reference", 0), ("nonsense", 1)])
def test_environment_variable_is_read_and_checked(value, code):
    program = "import interlayer; from interlayer.ops.choice import current; assert current() == 'reference'"
    result = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"INTERLAYER_BACKEND": value}, capture_output=True, text=True
    )
    assert result.returncode == code, result.stderr
    if code:
        assert "INTERLAYER_BACKEND: unknown backend 'nonsense'" in result.stderr
