"""Tests that the choice of a backend in one thread or task does not affect other threads and tasks."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import interlayer
from interlayer import backend, ops
from interlayer.ops import dispatch
from interlayer.ops.choice import current
from interlayer.ops.dispatch import Implementation, Operation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def signed():
    """Create an operation that adds a number which identifies the implementation."""
    implementations = [
        Implementation(name, lambda x, n=n: x + n, lambda x: None) for n, name in enumerate(("one", "two"), start=1)
    ]
    yield Operation("signed_for_a_test", lambda x: x + 0, implementations)
    del dispatch._OPERATIONS["signed_for_a_test"]


def ran(function):
    return {0.0: "reference", 1.0: "one", 2.0: "two"}[float(function(torch.zeros(())))]


def test_two_threads_at_the_same_time(signed):
    """Each thread computes inside its own block at the same time; the thread that started them has made no choice."""
    barrier = threading.Barrier(2, timeout=30)

    def work(name):
        found = []
        with backend(name):
            for _ in range(3):
                barrier.wait()
                found.append(ran(signed))
        barrier.wait()
        return [*found, ran(signed)]

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(work, name) for name in ("two", "reference")]
        assert ran(signed) == "one"
        assert [f.result() for f in futures] == [["two"] * 3 + ["one"], ["reference"] * 3 + ["one"]]


def test_a_thread_started_inside_has_chosen_nothing(signed):
    with backend("two"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(ran, signed).result() == "one"
        assert ran(signed) == "two"


def test_two_tasks_of_one_thread(signed):
    """A task that waits inside its block does not affect others; a task created inside it inherits its choice."""

    async def work(name):
        found = []
        with backend(name):
            for _ in range(3):
                await asyncio.sleep(0)
                found.append(ran(signed))
            found.append(await asyncio.create_task(inherited()))
        return [*found, ran(signed)]

    async def inherited():
        return ran(signed)

    async def main():
        results = await asyncio.gather(work("two"), work("reference"), inherited())
        return [*results, ran(signed)]

    expected = [["two"] * 4 + ["one"], ["reference"] * 4 + ["one"], "one", "one"]
    assert asyncio.run(main()) == expected


def test_blocks_inside_of_each_other_and_errors(signed):
    with backend("two"):
        with backend("reference"):
            assert ran(signed) == "reference"
        assert ran(signed) == "two"
        with pytest.raises(RuntimeError), backend("reference"):
            raise RuntimeError
        assert ran(signed) == "two"
        with backend("auto"):
            assert ran(signed) == "one"
    assert ran(signed) == "one"


def test_it_can_be_a_decorator(signed):
    assert ran(backend("two")(lambda x: signed(x))) == "two"


class TestCompiled:
    """A compiled function uses the choice in effect when it is called, not when it was compiled."""

    @pytest.fixture
    def compiled(self, signed):
        from torch._dynamo.testing import CompileCounter

        self.counter = CompileCounter()
        return torch.compile(lambda x: signed(x) * 1, backend=self.counter, fullgraph=True)

    def test_before_and_after_switching(self, compiled):
        assert ran(compiled) == "one"
        with backend("two"):
            assert ran(compiled) == "two"
            with backend("reference"):
                assert ran(compiled) == "reference"
            assert ran(compiled) == "two"
        assert ran(compiled) == "one"
        assert self.counter.frame_count == 3, "one graph for each choice, and no more"

    def test_compiled_inside_of_a_block(self, compiled):
        with backend("two"):
            assert ran(compiled) == "two"
        assert ran(compiled) == "one"

    def test_threads(self, compiled):
        assert ran(compiled) == "one"

        def work():
            with backend("two"):
                return ran(compiled)

        with backend("reference"), ThreadPoolExecutor(1) as pool:
            assert pool.submit(work).result() == "two"
            assert pool.submit(ran, compiled).result() == "one"
            assert ran(compiled) == "reference"

    def test_tasks(self, compiled):
        async def work(name):
            found = []
            with backend(name):
                for _ in range(3):
                    await asyncio.sleep(0)
                    found.append(ran(compiled))
            return found

        async def main():
            return await asyncio.gather(work("two"), work("reference"))

        assert asyncio.run(main()) == [["two"] * 3, ["reference"] * 3]

    def test_a_block_inside_of_the_compiled_function(self, signed):
        def function(x):
            with backend("two"):
                chosen = signed(x)
            return 10 * chosen + signed(x)

        compiled = torch.compile(function, backend="eager", fullgraph=True)
        assert compiled(torch.zeros(())) == 21
        assert ran(signed) == "one"
        with backend("reference"):
            assert compiled(torch.zeros(())) == 20

    def test_exported(self, signed):
        class Network(torch.nn.Module):
            def forward(self, x):
                return signed(x)

        for strict in (True, False):
            with backend("two"):
                exported = torch.export.export(Network(), (torch.zeros(()),), strict=strict).module()
            assert ran(exported) == "two"


class _Nested(torch.autograd.Function):
    """Runs nested backward passes, `depth` deep. The innermost one records its thread and the choice."""

    @staticmethod
    def forward(ctx, x, depth, seen):
        ctx.depth, ctx.seen = depth, seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth:
            with torch.enable_grad():
                x = torch.zeros((), requires_grad=True)
                _Nested.apply(x, ctx.depth - 1, ctx.seen).backward()
        else:
            ctx.seen.append((threading.get_ident(), current()))
        return grad, None, None


def test_a_thread_of_autograds_uses_the_choice_of_its_caller():
    """The sixty-first nested backward pass runs in another thread, like the backward pass on a GPU."""
    for name in ("reference", "auto", "triton"):
        seen = []
        with backend(name):
            x = torch.zeros((), requires_grad=True)
            _Nested.apply(x, 61, seen).backward()
        ((thread, choice),) = seen
        assert thread != threading.get_ident()
        assert choice == name
    _Nested.apply(x, 61, seen).backward()
    assert seen[1][1] == "auto"


@pytest.mark.parametrize("name", ["reference", "recompute", "auto"])
def test_gradient_checkpointing_recomputes_with_the_choice_of_the_backward_pass(name):
    """On a GPU it runs in a thread of the autograd engine. Another implementation would save other tensors and fail."""
    leaves = [torch.randn(s, device=DEVICE, requires_grad=True) for s in ((2, 5, 4), (12, 4), (12,), (4, 12), (4,))]
    seen = []

    def function(*tensors):
        seen.append(current())
        return ops.feed_forward(*tensors)

    with backend(name):
        checkpoint(function, *leaves, use_reentrant=False).sum().backward()
    assert seen == [name, name]
    assert all(leaf.grad is not None for leaf in leaves)


def test_the_process_has_a_default_of_its_own(monkeypatch):
    """INTERLAYER_BACKEND applies to every thread that has made no choice."""
    from interlayer.ops import choice

    monkeypatch.setattr(choice, "_default", "reference")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(current).result() == "reference"
        with interlayer.backend("auto"):
            assert current() == "auto"
            assert pool.submit(current).result() == "reference"
