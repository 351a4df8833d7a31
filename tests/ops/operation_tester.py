"""Tests that every operation has to pass.

A subclass names the operation and its implementations and creates samples. It inherits the comparison of every
implementation with the reference in float64: results, the gradient of every input, odd shapes, strided inputs, lower
precisions, autocast, and an error beyond the limits of an implementation that is chosen by name.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from interlayer import backend
from interlayer.ops.dispatch import Operation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DOUBLE = torch.float64 if DEVICE == "cpu" else torch.float32  # kernels support float64 only in Triton's interpreter


def draw(*shape: int, seed: int = 0, channels_last: bool = False) -> Tensor:
    """Return standard normal numbers in float64, identical on every device."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)
    return drawn.contiguous(memory_format=torch.channels_last) if channels_last else drawn


def gradients(function: Callable[..., Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the result of a function and the gradient of every leaf, for a fixed random gradient of the result."""
    result = function(*leaves)
    generator = torch.Generator().manual_seed(1)
    result.backward(torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result))
    found = [result.detach(), *(leaf.grad for leaf in leaves)]
    for leaf in leaves:
        leaf.grad = None
    return found


def copied(x: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device).copy_(x.detach())


def strided(x: Tensor) -> Tensor:
    """Return a view of every other element of a larger tensor, with the same values."""
    return torch.stack((x, torch.full_like(x, float("nan"))), -1)[..., 0]


def sizes(**options: Any) -> dict[str, Any]:
    """Return keyword arguments of `OperationTester.sample`."""
    return options


@dataclass(frozen=True)
class Sample:
    """Arguments of an operation.

    Args:
        tensors: Inputs with a gradient, by name, in the order of the operation's arguments. None for a missing input.
        options: Keyword arguments that are not tensors.
        buffers: Tensors that the operation updates in place.
    """

    tensors: dict[str, Tensor | None]
    options: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Sample":
        """Apply a function to all tensors and buffers."""
        tensors = {name: None if t is None else function(t) for name, t in self.tensors.items()}
        return replace(self, tensors=tensors, buffers={name: function(t) for name, t in self.buffers.items()})

    def change(self, **changes: Any) -> "Sample":
        """Replace tensors, buffers or options by name."""

        def updated(current: dict[str, Any]) -> dict[str, Any]:
            return current | {name: value for name, value in changes.items() if name in current}

        options = self.options | {n: v for n, v in changes.items() if n not in self.tensors and n not in self.buffers}
        return Sample(updated(self.tensors), options, updated(self.buffers))


@dataclass(frozen=True)
class Limit:
    """Arguments that an implementation does not support.

    Args:
        name: The implementation.
        match: A pattern that the error message matches.
        shape: Keyword arguments of `sample`.
        change: A function that changes the sample.
        runs: Whether another implementation supports the arguments.
    """

    name: str
    match: str
    shape: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Sample], Sample] = lambda sample: sample
    runs: bool = True


class OperationTester:
    """Base class of the tests of one operation.

    Attributes:
        operation: The operation.
        implementations: The names of its implementations, in the order in which they are tried.
        shapes: Keyword arguments of `sample`: odd sizes, and sizes larger and smaller than a tile.
        small: Keyword arguments of `sample` for tests that are slow.
        precisions: Pairs of a dtype and the largest relative error of each result in it.
        precise_shape: Keyword arguments of `sample` for lower precisions.
        autocast_tolerance: The largest relative error of each result under autocast.
        vanishing: Results that are zero except for rounding, whose relative error means nothing.
        limits: What the implementations do not support.
    """

    operation: ClassVar[Operation]
    implementations: ClassVar[Sequence[str]] = ()
    shapes: ClassVar[Sequence[dict[str, Any]]] = ({},)
    small: ClassVar[dict[str, Any]] = {}
    precisions: ClassVar[Sequence[tuple[torch.dtype, float]]] = ()
    precise_shape: ClassVar[dict[str, Any]] = {}
    autocast_tolerance: ClassVar[float] = 3e-2
    vanishing: ClassVar[Sequence[str]] = ()
    limits: ClassVar[Sequence[Limit]] = ()

    def sample(self, **shape: Any) -> Sample:
        """Make a sample in float64."""
        raise NotImplementedError

    def call(self, sample: Sample) -> Tensor | tuple[Tensor, ...]:
        """Call the public function of the operation."""
        raise NotImplementedError

    def cast(self, sample: Sample, dtype: torch.dtype) -> Sample:
        """Return the sample as a network that computes in `dtype` passes it."""
        return sample.map(lambda t: t.to(dtype))

    def context(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Return the context in which a network that computes in `dtype` calls the operation."""
        return nullcontext()

    @classmethod
    def cases(cls) -> list[Any]:
        """Return pairs of an implementation and a shape, marked as slow if the interpreter takes long."""
        return [(name, shape) for name in cls.implementations for shape in cls.shapes]

    @staticmethod
    def best_dtype(name: str) -> torch.dtype:
        """Return the dtype in which an implementation is most precise."""
        return DOUBLE if name == "triton" else torch.float64

    @staticmethod
    def tolerance(dtype: torch.dtype) -> dict[str, float]:
        """Return the tolerance of results in `best_dtype`."""
        return {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}

    def run(self, name: str, sample: Sample, context: AbstractContextManager[Any] | None = None) -> dict[str, Tensor]:
        """Return the results, gradients of all inputs and updated buffers of one implementation, by name."""
        copies = sample.map(copied)
        leaves = {n: t.requires_grad_() for n, t in copies.tensors.items() if t is not None}
        with backend(name), context or nullcontext():
            outputs = self.call(copies)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        grads = [draw(*t.shape, seed=100 + i).to(t.dtype) for i, t in enumerate(outputs)]
        with backend(name):
            torch.autograd.backward(outputs, grads)
        results = {f"result {i}": t.detach() for i, t in enumerate(outputs)}
        results |= {f"gradient of {n}": t.grad for n, t in leaves.items()}
        return results | copies.buffers

    def expected(self, sample: Sample) -> dict[str, Tensor]:
        """Return the results of the reference in float64."""
        return self.run("reference", sample.map(lambda t: t.double()))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        names, cls = metafunc.fixturenames, metafunc.cls
        if cls is None or metafunc.function.__name__ not in vars(OperationTester):
            return
        if "shape" in names:
            metafunc.parametrize(("name", "shape"), cls.cases())
        elif "dtype" in names:
            rows = [(name, *row) for name in cls.implementations for row in cls.precisions]
            metafunc.parametrize(("name", "dtype", "tolerance"), rows)
        elif "limit" in names:
            metafunc.parametrize("limit", cls.limits, ids=lambda limit: limit.match)
        elif "name" in names:
            metafunc.parametrize("name", cls.implementations)

    def test_order(self) -> None:
        """Implementations are tried in the order of the list at the end of the operation's file."""
        assert tuple(i.name for i in self.operation.implementations) == tuple(self.implementations)

    def test_values_and_gradients(self, name: str, shape: dict[str, Any]) -> None:
        """Results and the gradient of every input equal those of the reference in float64, for odd shapes too."""
        sample, dtype = self.sample(**shape), self.best_dtype(name)
        expected = self.expected(sample)
        found = self.run(name, self.cast(sample, dtype), self.context(dtype))
        assert found.keys() == expected.keys()
        for what, value in found.items():
            torch.testing.assert_close(
                value.double(), expected[what], msg=lambda m, what=what: f"{what}: {m}", **self.tolerance(dtype)
            )

    def test_gradcheck_of_the_reference(self) -> None:
        """The gradients of the reference agree with finite differences."""
        sample = self.sample(**self.small)
        names = [name for name, t in sample.tensors.items() if t is not None]

        def function(*leaves: Tensor) -> Tensor | tuple[Tensor, ...]:
            return self.call(sample.map(copied).change(**dict(zip(names, leaves, strict=True))))

        with backend("reference"):
            leaves = [sample.tensors[name].detach().requires_grad_() for name in names]
            assert torch.autograd.gradcheck(function, leaves, fast_mode=True)

    def test_strided_inputs(self, name: str) -> None:
        """A strided view of any input gives the same result, or an error if the implementation was chosen by name."""
        sample, dtype = self.cast(self.sample(**self.small), self.best_dtype(name)), self.best_dtype(name)
        expected = self.expected(sample)
        for changed, tensor in (sample.tensors | sample.buffers).items():
            if tensor is None:
                continue
            view = strided(tensor)
            torch.testing.assert_close(view, tensor)
            for chosen in ("auto", name):
                try:
                    found = self.run(chosen, sample.change(**{changed: view}), self.context(dtype))
                except ValueError as error:
                    if chosen == "auto" or "cannot compute" not in str(error):
                        raise
                    continue
                for what, value in found.items():
                    torch.testing.assert_close(
                        value.double(),
                        expected[what],
                        msg=lambda m, what=what, changed=changed: f"{what} for a strided {changed}: {m}",
                        **self.tolerance(dtype),
                    )

    def test_lower_precisions(self, name: str, dtype: torch.dtype, tolerance: float) -> None:
        """The error relative to float64 is within the tolerance of the dtype."""
        sample = self.cast(self.sample(**self.precise_shape), dtype)
        self.assert_near(self.run(name, sample, self.context(dtype)), self.expected(sample), tolerance)

    def test_autocast(self, name: str) -> None:
        """Under autocast, each gradient has the dtype of its input."""
        sample = self.cast(self.sample(**self.precise_shape), torch.float32)
        found = self.run(name, sample, torch.autocast(DEVICE, torch.bfloat16))
        for input_name, tensor in sample.tensors.items():
            assert tensor is None or found[f"gradient of {input_name}"].dtype == tensor.dtype
        self.assert_near(found, self.expected(sample), self.autocast_tolerance)

    def test_limits(self, limit: Limit) -> None:
        """An implementation chosen by name raises an error with the reason. With "auto", another one runs."""
        sample = limit.change(self.sample(**limit.shape).map(lambda t: t.float()))
        with backend(limit.name), pytest.raises(ValueError, match=limit.match):
            self.call(sample)
        if limit.runs:
            outputs = self.call(sample)
            assert all(t.isfinite().all() for t in ((outputs,) if isinstance(outputs, Tensor) else outputs))

    def assert_near(self, found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
        """Compare norms, because the gradient of a ReLU jumps where a rounded value changes its sign."""
        for what, value in found.items():
            if what not in self.vanishing:
                error = (value.double() - expected[what]).norm() / expected[what].norm()
                assert error < tolerance, f"{what}: {error:.1e}"
