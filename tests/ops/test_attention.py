"""Tests of multi-head attention over tokens."""

import pytest
import torch
from operation_tester import OperationTester, Sample, draw, sizes
from torch import nn

from interlayer import backend, ops
from interlayer.ops.attention import attention_operation


class TestAttention(OperationTester):
    operation = attention_operation
    implementations = ("fused",)
    shapes = ({}, sizes(queries=1, keys=1, heads=1, d=1), sizes(queries=9, keys=67, heads=2, d=5))
    small = sizes(queries=3, keys=4, heads=2, d=2)
    precisions = ((torch.float32, 1e-5), (torch.bfloat16, 3e-2))

    def sample(self, queries=11, keys=7, heads=3, d=6):
        lengths = {"q": queries, "k": keys, "v": keys}
        tensors = {name: draw(2, n, heads * d, seed=i) for i, (name, n) in enumerate(lengths.items())}
        return Sample(tensors, {"heads": heads, "scale": d**-0.5})

    def call(self, sample):
        return ops.attention(*sample.tensors.values(), **sample.options)


@pytest.mark.parametrize("name", ["reference", "fused"])
def test_it_is_torchs_attention(name):
    sample = TestAttention().sample()
    split = [t.unflatten(2, (3, -1)).transpose(1, 2) for t in sample.tensors.values()]
    expected = nn.functional.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)
    with backend(name):
        torch.testing.assert_close(TestAttention().call(sample), expected)


@pytest.mark.parametrize("name", ["reference", "fused"])
def test_bad_input_is_named(name):
    with backend(name), pytest.raises(ValueError, match="divisible by heads=0"):
        TestAttention().call(TestAttention().sample().change(heads=0))
