"""Were these wrong, keys and values of ResT would come from other pixels."""

import pytest
import torch

from interlayer import backend, ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DOUBLE = torch.float64 if DEVICE == "cpu" else torch.float32  # the kernel takes float64 in the interpreter alone


def make(shape=(2, 5, 9, 12), stride=4, dtype=DOUBLE):
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    x = draw(*shape).contiguous(memory_format=torch.channels_last)
    return [x, draw(shape[1], 1, stride + 1, stride + 1), draw(shape[1])]


def run(name, tensors, stride):
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]
    with backend(name):
        result = ops.shrink(*leaves, stride=stride)
    generator = torch.Generator().manual_seed(1)
    result.backward(torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result))
    return {"result": result.detach()} | {n: t.grad for n, t in zip(("x", "weight", "bias"), leaves, strict=True)}


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((2, 5, 9, 12), 4),  # no multiple of the stride
        ((1, 3, 8, 8), 8),  # one window, cut off on all sides
        ((2, 70, 6, 5), 2),  # more channels than a program's
        ((1, 1, 1, 3), 2),  # one row
        ((3, 2, 7, 7), 3),  # an odd stride
    ],
)
def test_values_and_gradients(shape, stride):
    tensors = make(shape, stride)
    expected = run("reference", [t.double() for t in tensors], stride)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if torch.float64 == DOUBLE else {"rtol": 1e-4, "atol": 1e-4}
    for what, value in run("triton", tensors, stride).items():
        torch.testing.assert_close(value.double(), expected[what], msg=lambda m, w=what: f"{w}: {m}", **tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_lower_precisions(dtype, tolerance):
    """The weights may stay in float32 beside a map in bfloat16, as autocast's do."""
    x, weight, bias = make((2, 8, 10, 11), 2, dtype)
    tensors = [x, weight.float(), bias.float()]
    expected = run("reference", [t.double() for t in tensors], 2)
    for what, value in run("triton", tensors, 2).items():
        error = (value.double() - expected[what]).norm() / expected[what].norm()
        assert error < tolerance, f"{what}: {error:.1e}"


@pytest.mark.parametrize(
    ("change", "stride", "reason"),
    [
        (lambda x, w, b: (x.contiguous(), w, b), 4, "the map must be channels_last"),
        (lambda x, w, b: (x, w[:, :, 1:, 1:], b), 4, "one window of stride"),
    ],
)
def test_limits_of_the_kernel_are_said(change, stride, reason):
    with backend("triton"), pytest.raises(ValueError, match=reason):
        ops.shrink(*change(*make(dtype=torch.float32)), stride=stride)


def test_it_is_an_operator_of_torchs():
    from interlayer.ops._triton import shrink as kernels

    x, weight, bias = (t.requires_grad_() for t in make((1, 2, 4, 4), 2, torch.float32))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernels._forward.registered, (x, weight, bias, 2), test_utils=tests)
    grad = torch.ones_like(kernels._forward(x, weight, bias, 2)).detach()
    torch.library.opcheck(kernels._backward.registered, (grad, x.detach(), weight.detach(), 2), test_utils=tests)


@pytest.mark.skipif(DEVICE != "cuda", reason="too large for the interpreter")
@pytest.mark.parametrize(("channels", "size", "stride"), [(64, 56, 8), (128, 28, 4), (256, 14, 2), (96, 56, 8)])
def test_real_sizes(channels, size, stride):
    tensors = make((8, channels, size, size), stride, torch.bfloat16)
    expected = run("reference", [t.float() for t in tensors], stride)
    for what, value in run("triton", tensors, stride).items():
        error = (value.float() - expected[what]).norm() / expected[what].norm()
        assert error < 1e-2, f"{what}: {error:.1e}"
