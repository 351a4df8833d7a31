"""Tests of the strided depthwise convolution of ResT."""

import pytest
import torch
from operation_tester import DEVICE, Limit, OperationTester, Sample, draw, sizes

from interlayer import ops


class TestShrink(OperationTester):
    operation = ops.shrink
    implementations = ("triton",)
    shapes = (
        {},  # not a multiple of the stride
        {"shape": (1, 3, 8, 8), "stride": 8},  # one window, clipped on all sides
        {"shape": (2, 70, 6, 5), "stride": 2},  # more channels than a program holds
        {"shape": (1, 1, 1, 3), "stride": 2},  # one row
        {"shape": (3, 2, 7, 7), "stride": 3},  # an odd stride
    )
    small = sizes(shape=(1, 2, 5, 4), stride=2)
    precise_shape = sizes(shape=(2, 8, 10, 11), stride=2)
    precisions = ((torch.float32, 1e-5), (torch.bfloat16, 1e-2))
    limits = (
        Limit("triton", "the map must be channels_last", change=lambda s: s.change(x=s.tensors["x"].contiguous())),
        Limit(
            "triton",
            "one window of stride",
            change=lambda s: s.change(weight=s.tensors["weight"][:, :, 1:, 1:]),
        ),
        Limit("triton", "expected a stride of 2 to 8", {"shape": (1, 2, 12, 12), "stride": 9}),
    )

    def sample(self, shape=(2, 5, 9, 12), stride=4):
        x = draw(*shape, channels_last=True)
        weight, bias = draw(shape[1], 1, stride + 1, stride + 1, seed=1), draw(shape[1], seed=2)
        return Sample({"x": x, "weight": weight, "bias": bias}, {"stride": stride})

    def call(self, sample):
        return ops.shrink(*sample.tensors.values(), **sample.options)

    def cast(self, sample, dtype):
        """The weights stay in float32 for a map in bfloat16, as under autocast."""
        wide = torch.promote_types(dtype, torch.float32)
        return sample.map(lambda t: t.to(dtype if t.dim() == 4 and t.shape[1] > 1 else wide))


def test_it_is_a_registered_operator():
    from interlayer.ops._triton import shrink as kernels

    x, weight, bias = (t.float().requires_grad_() for t in TestShrink().sample((1, 2, 4, 4), 2).tensors.values())
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernels._forward.registered, (x, weight, bias, 2), test_utils=tests)
    grad = torch.ones_like(kernels._forward(x, weight, bias, 2)).detach()
    torch.library.opcheck(kernels._backward.registered, (grad, x.detach(), weight.detach(), 2), test_utils=tests)


@pytest.mark.skipif(DEVICE != "cuda", reason="too large for the interpreter")
@pytest.mark.parametrize(("channels", "size", "stride"), [(64, 56, 8), (128, 28, 4), (256, 14, 2), (96, 56, 8)])
def test_real_sizes(channels, size, stride):
    tester = TestShrink()
    sample = tester.sample((8, channels, size, size), stride).map(lambda t: t.bfloat16())
    expected = tester.run("reference", sample.map(lambda t: t.float()))
    tester.assert_near(tester.run("triton", sample), expected, 1e-2)
