"""Tests that the operations compute the equations of the MRLA paper and their gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from operation_tester import OperationTester, Sample, draw, sizes
from torch.autograd import gradcheck

from interlayer.ops import depthwise_value, layer_attention, light_attention, linear_recurrence

B, HEADS, D, HEIGHT, WIDTH = 2, 3, 2, 4, 3  # odd sizes
C = HEADS * D


def rand(*shape, channels_last=False, grad=True):
    tensor = torch.randn(*shape, dtype=torch.float64)
    if channels_last:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    return tensor.requires_grad_(grad)


def softmax_attention_by_hand(query, keys, values):
    """Compute Eq. 6 with explicit loops over images, heads and layers."""
    output = torch.zeros_like(values[0])
    for b in range(len(query)):
        for h in range(HEADS):
            of_head = slice(h * D, (h + 1) * D)
            scores = [float(query[b, of_head] @ key[b, of_head]) / math.sqrt(D) for key in keys]
            total = sum(math.exp(s) for s in scores)
            for s, value in zip(scores, values, strict=True):
                output[b, of_head] += math.exp(s) / total * value[b, of_head]
    return output


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_layer_attention_is_equation_6(layers, channels_last):
    query = rand(B, C, grad=False)
    keys = [rand(B, C, grad=False) for _ in range(layers)]
    values = [rand(B, C, HEIGHT, WIDTH, channels_last=channels_last, grad=False) for _ in range(layers)]
    output, weights, derived = layer_attention(query, keys, values, heads=HEADS)
    torch.testing.assert_close(output, softmax_attention_by_hand(query, keys, values))
    assert weights.shape == (B, HEADS, layers)
    assert derived == []
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, HEADS, dtype=torch.float64))


def test_values_derived_here_are_those_derived_before():
    """Eq. 6 passes values on and Eq. 4 recomputes them. The same weight gives the same result."""
    query, keys = rand(B, C, grad=False), [rand(B, C, grad=False) for _ in range(3)]
    maps, weight = [rand(B, C, HEIGHT, WIDTH, grad=False) for _ in range(3)], rand(C, 1, 3, 3, grad=False)
    values = [depthwise_value(x, weight) for x in maps]
    expected, *_ = layer_attention(query, keys, values, heads=HEADS)
    output, _, derived = layer_attention(query, keys, values[:1], maps[1:], weight, heads=HEADS)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(derived, values[1:])


def test_light_attention_is_equation_8():
    x, previous = rand(B, C, HEIGHT, WIDTH, grad=False), rand(B, C, HEIGHT, WIDTH, grad=False)
    query, key, decay = rand(B, C, grad=False), rand(B, C, grad=False), rand(C, grad=False)
    weight = rand(C, 1, 3, 3, grad=False)
    output, gate = light_attention(x, query, key, weight, previous, decay, heads=HEADS)
    value = F.conv2d(x, weight, padding=1, groups=C)
    for b in range(B):
        for c in range(C):
            h = c // D
            score = (query[b, h * D : (h + 1) * D] @ key[b, h * D : (h + 1) * D]) / math.sqrt(D)
            torch.testing.assert_close(gate[b, h], torch.sigmoid(score))
            torch.testing.assert_close(output[b, c], torch.sigmoid(score) * value[b, c] + decay[c] * previous[b, c])


def test_linear_form_equals_the_papers_recurrence():
    """The recurrence in U and Z of appendix A.3 gives the same result as the sum over layers."""
    layers = 4
    queries = [rand(B, C, grad=False) for _ in range(layers)]
    keys = [rand(B, C, grad=False) for _ in range(layers)]
    values = [rand(B, C, HEIGHT, WIDTH, grad=False) for _ in range(layers)]
    state = None
    for t in range(layers):
        expected, state = linear_recurrence(values[t], queries[t], keys[t], None, state, heads=HEADS)
        output, *_ = layer_attention(queries[t], keys[: t + 1], values[: t + 1], heads=HEADS, weighting="linear")
        torch.testing.assert_close(output, expected)
    assert state[0].shape == (B, HEADS, D, D, HEIGHT, WIDTH), "U holds one map for every key channel of a head"


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("memory", ["decay", "one", "none"])
def test_light_gradients_are_exact(memory, gelu, channels_last):
    x = rand(B, C, HEIGHT, WIDTH, channels_last=channels_last)
    previous = rand(B, C, HEIGHT, WIDTH, channels_last=channels_last) if memory != "none" else None
    decay = rand(C) if memory == "decay" else None

    def run(x, query, key, weight, previous, decay):
        return light_attention(x, query, key, weight, previous, decay, heads=HEADS, gelu=gelu)

    assert gradcheck(run, (x, rand(B, C), rand(B, C), rand(C, 1, 3, 3), previous, decay))


@pytest.mark.parametrize("weighting", ["softmax", "linear"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_layer_attention_gradients_are_exact(weighting, channels_last):
    layers = 3
    inputs = [rand(B, C) for _ in range(layers + 1)]
    inputs += [rand(B, C, HEIGHT, WIDTH, channels_last=channels_last) for _ in range(layers)]
    inputs.append(rand(C, 1, 3, 3))

    def run(query, *rest):
        known, maps, weight = rest[layers : 2 * layers - 1], rest[2 * layers - 1 : 2 * layers], rest[-1]
        output, weights, derived = layer_attention(
            query, rest[:layers], known, maps, weight, heads=HEADS, weighting=weighting
        )
        return output, weights, *derived

    assert gradcheck(run, tuple(inputs))


def test_recurrence_gradients_are_exact():
    def run(query, key, value, u, z):
        output, (new_u, new_z) = linear_recurrence(value, query, key, None, (u, z), heads=HEADS)
        return output, new_u, new_z

    u, z = rand(B, HEADS, D, D, 2, 2), rand(B, HEADS, D).abs().detach().requires_grad_()
    assert gradcheck(run, (rand(B, C), rand(B, C), rand(B, C, 2, 2), u, z))


class TestDepthwiseValue(OperationTester):
    operation = depthwise_value
    small = sizes()

    def sample(self, channels=C):
        tensors = {"x": draw(B, channels, HEIGHT, WIDTH).cpu(), "weight": draw(channels, 1, 3, 3, seed=1).cpu()}
        return Sample(tensors, {"gelu": True})

    def call(self, sample):
        return depthwise_value(*sample.tensors.values(), **sample.options)


@pytest.mark.parametrize("operation", [depthwise_value, light_attention, layer_attention, linear_recurrence])
def test_there_is_the_reference_alone(operation):
    assert operation.implementations == []


def test_views_with_odd_strides_give_the_same_result():
    """Tokens are permuted views of [B, prefix + HW, C], so strides must not matter."""
    tokens = torch.randn(B, 1 + HEIGHT * WIDTH, C, dtype=torch.float64)
    view = tokens[:, 1:].unflatten(1, (HEIGHT, WIDTH)).permute(0, 3, 1, 2)
    weight, query, key = rand(C, 1, 3, 3, grad=False), rand(B, C, grad=False), rand(B, C, grad=False)
    plain = light_attention(view.contiguous(), query, key, weight, None, None, heads=HEADS)[0]
    torch.testing.assert_close(light_attention(view, query, key, weight, None, None, heads=HEADS)[0], plain)
    plain = layer_attention(query, [key], [view.contiguous()], heads=HEADS)[0]
    torch.testing.assert_close(layer_attention(query, [key], [view], heads=HEADS)[0], plain)


def test_channels_last_stays_channels_last():
    x = rand(B, C, HEIGHT, WIDTH, channels_last=True, grad=False)
    value = depthwise_value(x, rand(C, 1, 3, 3, grad=False))
    output, *_ = layer_attention(rand(B, C, grad=False), [rand(B, C, grad=False)] * 2, [value, value], heads=HEADS)
    assert output.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_its_dtype_and_comes_close(dtype):
    query, keys = torch.randn(B, C), [torch.randn(B, C) for _ in range(3)]
    values = [torch.randn(B, C, HEIGHT, WIDTH) for _ in range(3)]
    exact, *_ = layer_attention(query, keys, values, heads=HEADS)
    low, weights, _ = layer_attention(
        query.to(dtype), [k.to(dtype) for k in keys], [v.to(dtype) for v in values], heads=HEADS
    )
    assert low.dtype == dtype
    assert weights.dtype == torch.float32, "scores are computed in float32"
    assert (low.float() - exact).norm() / exact.norm() < 2e-2


def test_a_stage_of_24_keeps_each_value_once_for_backward():
    """Each value is saved once. The published program saves the stacked values of every layer, 12 times as much."""
    layers, channels, heads, size = 24, 32, 4, 8
    queries = [torch.randn(2, channels, requires_grad=True) for _ in range(layers)]
    keys = [torch.randn(2, channels, requires_grad=True) for _ in range(layers)]
    values = [torch.randn(2, channels, size, size, requires_grad=True) for _ in range(layers)]
    saved: dict[int, int] = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    outputs = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for t in range(layers):
            outputs.append(layer_attention(queries[t], keys[: t + 1], values[: t + 1], heads=heads)[0])
    maps = layers * values[0].untyped_storage().nbytes()
    assert sum(saved.values()) <= 1.1 * maps, f"{sum(saved.values()) / maps:.2f} times the value maps are kept"
    assert sum(saved.values()) >= maps, "the values themselves must be among what was seen"
    sum(output.sum() for output in outputs).backward()
    assert all(value.grad is not None for value in values)
