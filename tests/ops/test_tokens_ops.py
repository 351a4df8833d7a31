"""Were these wrong, a block would compute or learn something else to save memory."""

import pytest
import torch
import torch.nn.functional as F

from interlayer import backend, ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def weights(dtype=torch.float64):
    torch.manual_seed(0)
    shapes = [(2, 5, 4), (12, 4), (12,), (4, 12), (4,)]
    return [torch.randn(shape, dtype=dtype, device=DEVICE).requires_grad_() for shape in shapes]


def gradients(function, leaves):
    result = function(*leaves)
    generator = torch.Generator().manual_seed(1)
    result.backward(torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result))
    found = [result.detach(), *(leaf.grad for leaf in leaves)]
    for leaf in leaves:
        leaf.grad = None
    return found


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
    """In bfloat16, with gradients of the weights in float32, as torch's own layers."""
    leaves = weights(torch.float32)
    with backend(name), torch.autocast(DEVICE, torch.bfloat16):
        result, *found = gradients(ops.feed_forward, leaves)
    expected = gradients(lambda x, a, b, c, d: F.linear(F.gelu(F.linear(x, a, b)), c, d), leaves)
    assert result.dtype == torch.bfloat16
    for one, other in zip(found, expected[1:], strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 2e-2 * other.norm()


def test_layer_norm():
    x, *_ = weights(torch.float32)
    x, weight, bias = x.detach(), torch.randn(4, device=DEVICE), torch.randn(4, device=DEVICE)
    expected = F.layer_norm(x, (4,), weight, bias, 1e-5)
    torch.testing.assert_close(ops.layer_norm(x, weight, bias, 1e-5), expected)
    with torch.autocast(DEVICE, torch.bfloat16):
        narrow = ops.layer_norm(x, weight, bias, 1e-5)
    assert narrow.dtype == torch.bfloat16
    assert (narrow.float() - expected).norm() < 1e-2 * expected.norm()
    with backend("narrow"), pytest.raises(ValueError, match="without autocast"):
        ops.layer_norm(x, weight, bias, 1e-5)


def test_compiled():
    """There the compiler decides what to keep."""
    compiled = torch.compile(ops.feed_forward, backend="aot_eager", fullgraph=True)
    for one, other in zip(gradients(compiled, weights()), gradients(ops.feed_forward, weights()), strict=True):
        torch.testing.assert_close(one, other)


def test_shapes_alone():
    """On the meta device, which autocast does not know: models are counted there."""
    leaves = [t.detach().to("meta").requires_grad_() for t in weights(torch.float32)]
    assert ops.feed_forward(*leaves).shape == (2, 5, 4)
    assert ops.layer_norm(leaves[0], leaves[4], leaves[4], 1e-5).shape == (2, 5, 4)
