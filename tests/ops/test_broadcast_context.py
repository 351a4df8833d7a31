"""Were these wrong, tokens would be given another share of the average, or their gradients another way back."""

import pytest
import torch

from interlayer import backend, ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DOUBLE = torch.float64 if DEVICE == "cpu" else torch.float32  # the kernel takes float64 in the interpreter alone


def run(name, shape, scaled, dtype=DOUBLE):
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    x = draw(*shape).requires_grad_()
    scale = draw(shape[-1]).requires_grad_() if scaled else None
    with backend(name):
        result = ops.broadcast_context(x, scale)
    result.backward(draw(*shape))
    return [result.detach(), x.grad] + ([scale.grad] if scaled else [])


def by_definition(shape, scaled):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    scale = torch.randn(shape[-1], generator=generator, dtype=torch.float64).requires_grad_() if scaled else None
    tokens = x.flatten(1, -2)
    average = tokens.mean(1, keepdim=True)
    result = ((tokens + scale * average) if scaled else (tokens + average) / 2).view(shape)
    result.backward(torch.randn(shape, generator=generator, dtype=torch.float64))
    return [result.detach(), x.grad] + ([scale.grad] if scaled else [])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 5, 7),
        (3, 197, 70),  # DeiT's tokens, more channels than a program's
        (2, 257, 3),  # more tokens than a program holds
        (2, 4, 5, 6),  # a map
        (1, 1, 1),  # a token that is its own average
    ],
)
def test_values_and_gradients(shape, name, scaled):
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if torch.float64 == DOUBLE else {"rtol": 1e-4, "atol": 1e-4}
    for found, expected in zip(run(name, shape, scaled), by_definition(shape, scaled), strict=True):
        torch.testing.assert_close(found.double().cpu(), expected, **tolerance)


@pytest.mark.parametrize("scaled", [False, True])
def test_bfloat16(scaled):
    for found, expected in zip(
        run("triton", (2, 197, 48), scaled, torch.bfloat16), by_definition((2, 197, 48), scaled), strict=True
    ):
        error = (found.double().cpu() - expected).norm() / expected.norm()
        assert error < 1e-2, f"{error:.1e}"


def test_a_scale_in_float32_beside_tokens_in_bfloat16():
    """As under autocast: the tokens' type stays, the scale's gradient is in its own."""
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
    """Are left to torch unless asked for by name: a program for each image would leave a GPU idle."""
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
    """The compiler sees through the reference."""
    x, scale = torch.randn(2, 5, 4, device=DEVICE), torch.randn(4, device=DEVICE) if scaled else None
    compiled = torch.compile(ops.broadcast_context, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, scale), ops.broadcast_context(x, scale))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"expected tokens of \[B, N, C\]"):
        ops.broadcast_context(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="a scale for each of 3 channels"):
        ops.broadcast_context(torch.zeros(1, 2, 3), torch.zeros(2))
