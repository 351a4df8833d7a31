"""Tests of the feed-forward network that recomputes its activation."""

import pytest
import torch
import torch.nn.functional as F
from operation_tester import DEVICE, DOUBLE, OperationTester, Sample, gradients, sizes

from interlayer import backend, ops
from interlayer.ops.feed_forward import column_sums, gelu_gradients

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9} if torch.float64 == DOUBLE else {"rtol": 1e-4, "atol": 1e-3}


def weights(dtype=torch.float64):
    torch.manual_seed(0)
    shapes = [(2, 5, 4), (12, 4), (12,), (4, 12), (4,)]
    return [torch.randn(shape, dtype=dtype, device=DEVICE).requires_grad_() for shape in shapes]


class TestFeedForward(OperationTester):
    operation = ops.feed_forward
    implementations = ("recompute",)
    shapes = ({}, sizes(shape=(3, 7), hidden=5, out=2), sizes(shape=(2, 3, 2, 1), hidden=1, out=1))
    precise_shape = sizes(shape=(2, 9, 16), hidden=48, out=16)
    precisions = ((torch.float32, 1e-5), (torch.bfloat16, 3e-2))

    def sample(self, shape=(2, 5, 4), hidden=12, out=4):
        shapes = {"x": shape, "weight_1": (hidden, shape[-1]), "bias_1": (hidden,), "weight_2": (out, hidden)}
        shapes["bias_2"] = (out,)
        return Sample({name: draw(*size, dtype=torch.float64, seed=i) for i, (name, size) in enumerate(shapes.items())})

    def call(self, sample):
        return ops.feed_forward(*sample.tensors.values())


@pytest.mark.parametrize("operation", [gelu_gradients, column_sums])
def test_steps_of_the_backward_pass_have_a_kernel(operation):
    assert [(i.name, i.strict) for i in operation.implementations] == [("triton", False)]


def test_feed_forward_values_and_gradients():
    found = []
    for name in ("reference", "recompute"):
        with backend(name):
            found.append(gradients(ops.feed_forward, weights()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_it_keeps_one_map_instead_of_two():
    kept = {}
    for name in ("reference", "recompute"):
        sizes = []
        with (
            backend(name),
            torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: (s.append(t), t)[1], lambda t: t),
        ):
            ops.feed_forward(*weights())
        kept[name] = len({t.data_ptr() for t in sizes if t.numel() == 2 * 5 * 12})
    assert kept == {"reference": 2, "recompute": 1}


@pytest.mark.parametrize("name", ["reference", "recompute"])
def test_under_autocast(name):
    """It computes in bfloat16 and returns gradients of the weights in float32, like torch's own layers."""
    leaves = weights(torch.float32)
    with backend(name), torch.autocast(DEVICE, torch.bfloat16):
        result, *found = gradients(ops.feed_forward, leaves)
    expected = gradients(lambda x, a, b, c, d: F.linear(F.gelu(F.linear(x, a, b)), c, d), leaves)
    assert result.dtype == torch.bfloat16
    for one, other in zip(found, expected[1:], strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 2e-2 * other.norm()


def test_compiled():
    """Inside torch.compile, the compiler selects the tensors to save."""
    compiled = torch.compile(ops.feed_forward, backend="aot_eager", fullgraph=True)
    for one, other in zip(gradients(compiled, weights()), gradients(ops.feed_forward, weights()), strict=True):
        torch.testing.assert_close(one, other)


def test_shapes_alone():
    """FLOPs are counted on the meta device, which autocast does not support."""
    leaves = [t.detach().to("meta").requires_grad_() for t in weights(torch.float32)]
    assert ops.feed_forward(*leaves).shape == (2, 5, 4)


def draw(*shape, dtype=DOUBLE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


@pytest.mark.parametrize("shape", [(5, 4), (1, 1), (700, 130), (3, 300)])
def test_the_fused_gradients_of_gelu(shape):
    x, grad = draw(*shape), draw(*shape, seed=1)
    expected = [t.double() for t in gelu_gradients.reference(x.double(), grad.double())]
    with backend("triton"):
        found = gelu_gradients(x, grad.clone())
        sums = column_sums(grad)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, **TOLERANCE)
    torch.testing.assert_close(sums.double(), grad.double().sum(0), **TOLERANCE)


def test_sums_of_bfloat16_are_added_up_in_float32():
    x = torch.full((3000, 2), 0.01, dtype=torch.bfloat16, device=DEVICE)
    with backend("triton"):
        sums = column_sums(x)
    torch.testing.assert_close(sums, x.double().sum(0).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(DOUBLE, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_a_feed_forward_with_fused_gradients(dtype, tolerance):
    """In training on a GPU, the steps of the backward pass have implementations of their own."""
    result, grad = {}, draw(2, 5, 4, dtype=dtype, seed=3)
    for name in ("reference", "triton"):
        leaves = weights(dtype)
        with backend("recompute"):
            output = ops.feed_forward(*leaves)
        with backend(name):
            result[name] = torch.autograd.grad(output, leaves, grad)
    for one, other in zip(result["reference"], result["triton"], strict=True):
        assert one.dtype == other.dtype == dtype
        assert (one - other).double().norm() < tolerance * one.double().norm()


def test_an_expanded_gradient():
    """The gradient of a sum is expanded and not contiguous, so the reference runs."""
    leaves = weights(torch.float32)
    with backend("recompute"):
        output = ops.feed_forward(*leaves)
    with backend("triton"):
        found = torch.autograd.grad(output.sum(), leaves)
    with backend("reference"):
        expected = torch.autograd.grad(ops.feed_forward(*leaves).sum(), leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_frozen_weights_cost_nothing():
    """Of the four matrix products of the backward pass, those of frozen weights are skipped."""
    from torch.utils.flop_counter import FlopCounterMode

    counted = {}
    for name in ("reference", "recompute"):
        x, *rest = weights(torch.float32)
        with backend(name), FlopCounterMode(display=False) as counter:
            ops.feed_forward(x, *(t.detach() for t in rest)).sum().backward()
        counted[name] = counter.get_total_flops()
    assert counted["recompute"] == counted["reference"]
