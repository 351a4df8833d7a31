"""Were these wrong, the wrong implementation would run, or a kernel would run beyond its limits."""

import os
import subprocess
import sys

import pytest
import torch

import interlayer
from interlayer.ops.dispatch import Operation, backends


@pytest.fixture
def doubled():
    """An operation with a kernel that takes even lengths only, and says which implementation ran."""
    from interlayer.ops import dispatch as module

    def twice_for_a_test(x):
        return "reference", 2 * x

    operation = Operation(twice_for_a_test)

    @operation.kernel("even", lambda x: None if len(x) % 2 == 0 else f"needs an even length, got {len(x)}")
    def _even(x):
        return "even", x + x

    yield operation
    del module._OPERATIONS["twice_for_a_test"]


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


def test_unknown_backend_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown backend 'cuda', expected one of auto, reference"):
        interlayer.backend("cuda").__enter__()
    assert backends()[:2] == ["auto", "reference"]


@pytest.mark.parametrize(("value", "code"), [("reference", 0), ("nonsense", 1)])
def test_environment_variable_is_read_and_checked(value, code):
    program = "import interlayer; from interlayer.ops.dispatch import _choice; assert _choice.name == 'reference'"
    result = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"INTERLAYER_BACKEND": value}, capture_output=True, text=True
    )
    assert result.returncode == code, result.stderr
    if code:
        assert "INTERLAYER_BACKEND: unknown backend 'nonsense'" in result.stderr
