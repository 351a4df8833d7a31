"""Tests of the attention of ResT with mixed and normalized heads."""

import pytest
import torch
from operation_tester import DEVICE, Limit, OperationTester, Sample, sizes
from torch import nn

from interlayer import backend, ops
from interlayer.ops.mixed_attention import mixed_attention_operation

KERNELS = ["affine", "triton"]


def make(queries=11, keys=7, heads=3, d=6, batch=2, dtype=torch.float64, joined=False):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    width = heads * d
    q = draw(batch, queries, width)
    k, v = draw(batch, keys, 2 * width).chunk(2, -1) if joined else (draw(batch, keys, width), draw(batch, keys, width))
    return [q, k, v, draw(heads, heads), draw(heads)], {"heads": heads, "scale": d**-0.5}


def run(name, tensors, options):
    leaves = [t.detach().requires_grad_() for t in tensors]  # no copies, which would have another layout
    with backend(name):
        result = ops.mixed_attention(*leaves, **options)
    generator = torch.Generator().manual_seed(1)
    result.backward(torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result))
    return {"result": result.detach()} | {
        n: t.grad for n, t in zip(("q", "k", "v", "mix", "bias"), leaves, strict=True)
    }


def test_the_reference_is_the_published_arrangement():
    """Compute convolution over heads, softmax and instance norm with torch's own modules."""
    (q, k, v, mix, bias), options = make()
    conv, norm = nn.Conv2d(3, 3, 1).double().to(DEVICE), nn.InstanceNorm2d(3).double().to(DEVICE)
    with torch.no_grad():
        conv.weight.copy_(mix[..., None, None])
        conv.bias.copy_(bias)
    split = [t.reshape(2, -1, 3, 6).permute(0, 2, 1, 3) for t in (q, k, v)]
    weights = norm((conv(split[0] @ split[1].transpose(2, 3) * 6**-0.5)).softmax(-1))
    expected = (weights @ split[2]).transpose(1, 2).reshape(2, 11, 18)
    with backend("reference"):
        torch.testing.assert_close(ops.mixed_attention(q, k, v, mix, bias, **options), expected)


class TestMixedAttention(OperationTester):
    """The shapes have fewer and more tokens than a tile, and keys and values from one projection."""

    operation = mixed_attention_operation
    implementations = ("triton", "affine")
    shapes = (
        {},
        sizes(queries=1, keys=2, heads=2, d=1),
        sizes(queries=70, keys=5, heads=2, d=8, joined=True),
        sizes(queries=9, keys=67, heads=2, d=4),
        sizes(queries=16, keys=16, heads=4, d=33, batch=1),
    )
    small = sizes(queries=5, keys=4, heads=2, d=2)
    precise_shape = sizes(queries=20, keys=49, heads=2, d=16)
    precisions = ((torch.float32, 1e-3), (torch.bfloat16, 5e-2))
    autocast_tolerance = 5e-2
    vanishing = ("gradient of bias",)
    limits = (
        Limit("triton", "one floating-point type", change=lambda s: s.change(q=s.tensors["q"].half()), runs=False),
        Limit(
            "triton",
            "one after another",
            change=lambda s: s.change(q=s.tensors["q"].transpose(1, 2).contiguous().transpose(1, 2)),
        ),
        Limit("triton", "at most 128 channels, got 129", sizes(heads=1, d=129)),
    )

    def sample(self, **shape):
        tensors, options = make(**shape)
        return Sample(dict(zip(("q", "k", "v", "mix", "bias"), tensors, strict=True)), options)

    def call(self, sample):
        return ops.mixed_attention(*sample.tensors.values(), **sample.options)

    def tolerance(self, dtype):
        return {"rtol": 1e-7, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-3}


def test_the_bias_changes_nothing():
    """The bias is constant over a row of scores. Its gradient exists and is zero."""
    tensors, options = make()
    moved = [*tensors[:4], tensors[4] + 3]
    for name in ("reference", *KERNELS):
        single = name == "triton" and DEVICE == "cuda"
        one, other = (run(name, [t.float() for t in ts] if single else ts, options) for ts in (tensors, moved))
        torch.testing.assert_close(one["result"], other["result"])
        assert one["bias"].abs().max() < 1e-4


@pytest.mark.parametrize("name", KERNELS)
def test_attention_that_is_nearly_uniform_keeps_its_precision(name):
    """The norm multiplies the values minus their mean by a factor in the hundreds."""
    (q, k, v, mix, bias), options = make(40, 49, heads=2, d=32, dtype=torch.bfloat16)
    tensors = [q * 0.05, k, v + 3, mix, bias]
    expected = run("reference", [t.double() for t in tensors], options)
    for what, value in run(name, tensors, options).items():
        if what in ("result", "v"):
            error = (value.double() - expected[what]).norm() / expected[what].norm()
            cut_off = name == "triton" and DEVICE == "cpu"  # the interpreter truncates, a GPU rounds
            assert error < (8e-2 if cut_off else 5e-2), f"{what}: {error:.1e}"


def test_one_token_for_one_key_is_nothing():
    """A map of one value has no variance, and its norm is zero."""
    tensors, options = make(1, 1)
    for name in ("reference", *KERNELS):
        single = name == "triton" and DEVICE == "cuda"
        result = run(name, [t.float() for t in tensors] if single else tensors, options)["result"]
        torch.testing.assert_close(result, torch.zeros_like(result))


@pytest.mark.parametrize("name", ["reference", *KERNELS])
def test_bad_input_is_named(name):
    (q, k, v, mix, bias), options = make(dtype=torch.float32)
    with backend(name), pytest.raises(ValueError, match=r"over heads of \(3, 3\) and \(3,\), got \(2, 2\)"):
        ops.mixed_attention(q, k, v, mix[:2, :2], bias, **options)
    with backend(name), pytest.raises(ValueError, match="expected queries"):
        ops.mixed_attention(q, k[:, :, :6], v[:, :, :6], mix, bias, **options)
    with backend(name), pytest.raises(ValueError, match="divisible by heads=0"):
        ops.mixed_attention(q, k, v, mix, bias, heads=0, scale=1.0)


def test_limits_of_the_kernel_are_said():
    (q, k, v, mix, bias), options = make(dtype=torch.float32)
    with backend("triton"), pytest.raises(ValueError, match="one floating-point type"):
        ops.mixed_attention(q.half(), k, v, mix, bias, **options)
    with backend("triton"), pytest.raises(ValueError, match="one after another"):
        ops.mixed_attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, mix, bias, **options)
    wide, options = make(heads=1, d=130, dtype=torch.float32)
    with backend("triton"), pytest.raises(ValueError, match="at most 128 channels, got 130"):
        ops.mixed_attention(*wide, **options)


def test_it_is_a_registered_operator():
    from interlayer.ops._triton import mixed_attention as kernels

    tensors, options = make(5, 4, heads=2, d=2, dtype=torch.float32)
    leaves = [t.requires_grad_() for t in tensors]
    options = (*options.values(), 1e-5)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernels._forward.registered, (*leaves, *options), test_utils=tests)
    outputs = kernels._forward(*leaves, *options)
    q, k, _, mix, _ = leaves
    given = [t.detach() for t in (outputs[0], q, k, mix, *outputs)]
    torch.library.opcheck(kernels._backward.registered, (*given, *options[:2]), test_utils=tests)


@pytest.mark.skipif(DEVICE != "cuda", reason="too large for the interpreter")
@pytest.mark.parametrize(("queries", "heads", "d"), [(784, 2, 64), (196, 4, 64), (49, 8, 64), (196, 4, 96)])
def test_real_sizes(queries, heads, d):
    """Runs the shapes of ResT at 224 pixels four times, in bfloat16."""
    tensors, options = make(queries, 49, heads, d, dtype=torch.bfloat16, joined=True)
    expected = run("affine", [t.float() for t in tensors], options)
    for _ in range(4):
        for what, value in run("triton", tensors, options).items():
            error = (value.float() - expected[what]).norm() / (expected[what].norm() + 1e-6)
            assert error < 5e-2 or what == "bias", f"{what}: {error:.1e}"


def test_its_maps_are_those_of_the_result():
    """The maps follow the equations one after another, and the last one times the values is the result."""
    (q, k, v, mix, bias), options = make()
    maps = ops.mixed_attention_maps(q, k, mix, bias, **options)
    mixed = torch.einsum("ji,binm->bjnm", mix, maps.scores) + bias[:, None, None]
    torch.testing.assert_close(maps.mixed, mixed)
    torch.testing.assert_close(maps.weights, mixed.softmax(-1))
    torch.testing.assert_close(maps.weights.sum(-1), torch.ones_like(maps.weights[..., 0]))
    for map_ in maps.normalized.flatten(0, 1):
        assert map_.mean().abs() < 1e-12
    values = v.unflatten(2, (3, 6)).transpose(1, 2)
    for name in ("reference", "affine"):
        with backend(name):
            result = ops.mixed_attention(q, k, v, mix, bias, **options)
        torch.testing.assert_close((maps.normalized @ values).transpose(1, 2).flatten(2), result)
    with pytest.raises(ValueError, match="over heads of"):
        ops.mixed_attention_maps(q, k, mix[:2], bias, **options)
