"""Tests of context broadcasting and its gradients."""

import pytest
import torch
from operation_tester import DEVICE, Limit, OperationTester, Sample, draw, sizes

from interlayer import backend, ops
from interlayer.ops.broadcast_context import broadcast_context_operation


def by_definition(sample):
    """Compute Eq. 1 of the paper, or its scaled form, with every gradient."""
    x, scale = (None if t is None else t.detach().double().cpu().requires_grad_() for t in sample.tensors.values())
    tokens = x.flatten(1, -2)
    average = tokens.mean(1, keepdim=True)
    result = ((tokens + average) / 2 if scale is None else tokens + scale * average).view(x.shape)
    result.backward(draw(*x.shape, seed=100).cpu())
    found = {"result 0": result.detach(), "gradient of x": x.grad}
    return found if scale is None else found | {"gradient of scale": scale.grad}


class TestBroadcastContext(OperationTester):
    operation = broadcast_context_operation
    implementations = ("triton",)
    shapes = tuple(
        sizes(shape=shape, scaled=scaled)
        for scaled in (False, True)
        for shape in [
            (2, 5, 7),
            (3, 197, 70),  # the tokens of DeiT, more channels than a program holds
            (2, 257, 3),  # more tokens than a program holds
            (2, 4, 5, 6),  # a map
            (1, 1, 1),  # a token that is its own average
        ]
    )
    small = sizes(scaled=True)
    precise_shape = sizes(shape=(2, 197, 48), scaled=True)
    precisions = ((torch.float32, 1e-5), (torch.bfloat16, 1e-2))
    limits = (
        Limit("triton", "lie one after another", change=lambda s: s.change(x=s.tensors["x"].transpose(1, 2))),
        Limit("triton", "there are no tokens", sizes(shape=(0, 5, 7))),
        Limit("triton", "of a floating-point type", change=lambda s: s.map(lambda t: t.to(torch.complex64))),
    )

    def sample(self, shape=(2, 5, 7), scaled=False):
        return Sample({"x": draw(*shape), "scale": draw(shape[-1], seed=1) if scaled else None})

    def call(self, sample):
        return ops.broadcast_context(*sample.tensors.values())


@pytest.mark.parametrize("shape", TestBroadcastContext.shapes)
def test_the_reference_is_the_definition(shape):
    tester = TestBroadcastContext()
    sample = tester.sample(**shape)
    expected = by_definition(sample)
    for what, value in tester.run("reference", sample).items():
        torch.testing.assert_close(value.cpu(), expected[what], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scaled", [False, True])
def test_bfloat16(scaled):
    tester = TestBroadcastContext()
    sample = tester.cast(tester.sample((2, 197, 48), scaled), torch.bfloat16)
    tester.assert_near(tester.run("triton", sample), {k: v.to(DEVICE) for k, v in by_definition(sample).items()}, 1e-2)


def test_a_scale_in_float32_beside_tokens_in_bfloat16():
    """Tokens keep their dtype, and the gradient of the scale has the dtype of the scale, as under autocast."""
    x = torch.randn(2, 5, 4, device=DEVICE).bfloat16()
    scale = torch.ones(4, device=DEVICE, requires_grad=True)
    for name in ("reference", "triton"):
        with backend(name):
            result = ops.broadcast_context(x, scale)
        (grad,) = torch.autograd.grad(result.sum(), scale)
        assert (result.dtype, grad.dtype) == (torch.bfloat16, torch.float32)


def test_a_gradient_from_another_layout():
    grads = {}
    for name in ("reference", "triton"):
        x, scale = torch.ones(2, 5, 4, device=DEVICE, requires_grad=True), torch.arange(4.0, device=DEVICE)
        with backend(name):
            result = ops.broadcast_context(x, scale.requires_grad_()).transpose(1, 2)
        generator = torch.Generator().manual_seed(2)
        grad = torch.randn(2, 4, 5, generator=generator).to(DEVICE)
        grads[name] = torch.autograd.grad(result, (x, scale), grad)
    for one, other in zip(*grads.values(), strict=True):
        torch.testing.assert_close(one, other)


def test_few_images_of_many_tokens():
    """The kernel is used only if chosen by name: one program for each image would not occupy a GPU."""
    from interlayer.ops._triton import broadcast_context as kernel

    assert kernel._leaves_idle(torch.zeros(2, 4096, 64))
    assert not kernel._leaves_idle(torch.zeros(128, 4096, 64))
    assert not kernel._leaves_idle(torch.zeros(2, 197, 64))


def test_tokens_in_another_order_go_to_the_reference():
    x = torch.randn(2, 4, 5, device=DEVICE).transpose(1, 2)
    torch.testing.assert_close(ops.broadcast_context(x), (x + x.mean(1, keepdim=True)) / 2)
    with backend("triton"), pytest.raises(ValueError, match="lie one after another"):
        ops.broadcast_context(x)


@pytest.mark.parametrize("scaled", [False, True])
def test_compiled(scaled):
    """The compiler traces the reference."""
    x, scale = torch.randn(2, 5, 4, device=DEVICE), torch.randn(4, device=DEVICE) if scaled else None
    compiled = torch.compile(ops.broadcast_context, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, scale), ops.broadcast_context(x, scale))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"expected tokens of \[B, N, C\]"):
        ops.broadcast_context(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="a scale for each of 3 channels"):
        ops.broadcast_context(torch.zeros(1, 2, 3), torch.zeros(2))
