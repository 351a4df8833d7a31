"""Tests that a 1x1 convolution gives the same result inside torch.compile."""

import pytest
import torch
from operation_tester import DEVICE, DOUBLE
from torch import nn

from interlayer import ops


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_a_pointwise_convolution_is_one_when_compiled_too(memory_format):
    """The matrix product over pixels has the result and gradients of the convolution."""
    x = torch.randn(2, 5, 3, 4, dtype=DOUBLE, device=DEVICE).contiguous(memory_format=memory_format)
    weight = torch.randn(7, 5, 1, 1, dtype=DOUBLE, device=DEVICE)
    found = []
    for function in (nn.functional.conv2d, torch.compile(ops.pointwise, backend="aot_eager", fullgraph=True)):
        leaves = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, weight)]
        result = function(*leaves)
        result.square().sum().backward()
        found.append([result.detach(), *(t.grad for t in leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
