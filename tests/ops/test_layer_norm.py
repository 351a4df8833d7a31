"""Tests of the layer norm over tokens."""

import pytest
import torch
import torch.nn.functional as F
from operation_tester import DEVICE, DOUBLE, Limit, OperationTester, Sample, gradients, sizes
from operation_tester import draw as draw_double

from interlayer import backend, ops

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9} if torch.float64 == DOUBLE else {"rtol": 1e-4, "atol": 1e-3}


def draw(*shape, dtype=DOUBLE, seed=0):
    return draw_double(*shape, seed=seed).to(dtype)


class TestLayerNorm(OperationTester):
    operation = ops.layer_norm
    implementations = ("triton", "narrow")
    shapes = (
        {},
        sizes(shape=(3, 7, 65)),  # no power of two
        sizes(shape=(1, 1, 1)),  # one value, which is normalized to the bias
        sizes(shape=(700, 96)),  # more rows than the programs hold at once
        sizes(shape=(2, 3, 1100)),  # rows longer than a tile
    )
    precise_shape = sizes(shape=(6, 48))
    precisions = ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3))
    limits = (
        Limit("triton", "at most 4096 channels, got 4097", sizes(shape=(1, 4097))),
        Limit("triton", "there are no tokens", sizes(shape=(0, 4))),
        Limit("triton", "lie one after another", change=lambda s: s.change(x=s.tensors["x"].transpose(0, 1))),
        Limit("narrow", "without autocast"),
    )

    @classmethod
    def cases(cls):
        return [("triton", shape) for shape in cls.shapes]  # the other one requires autocast

    def sample(self, shape=(2, 5, 4)):
        weight, bias = (draw_double(shape[-1], seed=seed) for seed in (1, 2))
        return Sample({"x": draw_double(*shape), "weight": weight, "bias": bias})

    def call(self, sample):
        return ops.layer_norm(*sample.tensors.values(), 1e-5)

    def tolerance(self, dtype):
        return TOLERANCE

    def test_lower_precisions(self, name, dtype, tolerance):
        if name == "narrow":
            pytest.skip("it works under autocast alone")
        super().test_lower_precisions(name, dtype, tolerance)


def test_layer_norm():
    x, weight, bias = draw(2, 5, 4, dtype=torch.float32), torch.randn(4, device=DEVICE), torch.randn(4, device=DEVICE)
    expected = F.layer_norm(x, (4,), weight, bias, 1e-5)
    torch.testing.assert_close(ops.layer_norm(x, weight, bias, 1e-5), expected)
    with torch.autocast(DEVICE, torch.bfloat16):
        narrow = ops.layer_norm(x, weight, bias, 1e-5)
    assert narrow.dtype == torch.bfloat16
    assert (narrow.float() - expected).norm() < 1e-2 * expected.norm()
    with backend("narrow"), pytest.raises(ValueError, match="without autocast"):
        ops.layer_norm(x, weight, bias, 1e-5)


def test_the_fused_norm_under_autocast():
    """Tokens in float32 or bfloat16 give a result in bfloat16, and each gradient has the dtype of its input."""
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [
            draw(6, 48, dtype=dtype),
            draw(48, dtype=torch.float32, seed=1),
            draw(48, dtype=torch.float32, seed=2),
        ]
        leaves = [t.requires_grad_() for t in leaves]
        with backend("triton"), torch.autocast(DEVICE, torch.bfloat16):
            found = gradients(lambda *t: ops.layer_norm(*t, 1e-5), leaves)
        expected = gradients(lambda *t: F.layer_norm(t[0].float(), (48,), t[1], t[2], 1e-5), leaves)
        assert [t.dtype for t in found] == [torch.bfloat16, dtype, torch.float32, torch.float32]
        for one, other in zip(found, expected, strict=True):
            assert (one - other).norm() < 1e-2 * other.norm()


def test_gradients_from_another_layout():
    """If the output is transposed, its gradient is not contiguous."""
    grads = {}
    for name in ("reference", "triton"):
        x = draw(2, 5, 4).requires_grad_()
        with backend(name):
            result = ops.layer_norm(x, draw(4, seed=1), draw(4, seed=2), 1e-5).transpose(1, 2)
        grads[name] = torch.autograd.grad(result, x, draw(2, 4, 5, seed=3))[0]
    torch.testing.assert_close(grads["reference"], grads["triton"], **TOLERANCE)


def test_limits_of_the_fused_norm_are_said():
    with backend("triton"), pytest.raises(ValueError, match="at most 4096 channels, got 4097"):
        ops.layer_norm(torch.zeros(1, 4097, device=DEVICE), *torch.zeros(2, 4097, device=DEVICE), 1e-5)
    with backend("triton"), pytest.raises(ValueError, match="there are no tokens"):
        ops.layer_norm(torch.zeros(0, 4, device=DEVICE), *torch.zeros(2, 4, device=DEVICE), 1e-5)
    assert ops.layer_norm(torch.zeros(0, 4, device=DEVICE), *torch.zeros(2, 4, device=DEVICE), 1e-5).shape == (0, 4)


def test_shapes_alone():
    """FLOPs are counted on the meta device, which autocast does not support."""
    x, weight = torch.empty(2, 5, 4, device="meta"), torch.empty(4, device="meta")
    assert ops.layer_norm(x, weight, weight, 1e-5).shape == (2, 5, 4)
