"""Tests of fused operations inside compilers, tracers, transforms and gradient checkpointing."""

import pytest
import timm
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import interlayer
from interlayer import backend, ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape, channels_last=False):
    generator = torch.Generator().manual_seed(sum(shape))
    drawn = torch.randn(shape, generator=generator).to(DEVICE)
    drawn = drawn.contiguous(memory_format=torch.channels_last) if channels_last else drawn
    return drawn.requires_grad_()


def halo():
    maps = [draw(1, 4, 6, 6, channels_last=True) for _ in range(3)]
    tables = [draw(11, 1), draw(11, 1)]  # a neighborhood of 4 + 2 pixels, heads of 2 channels
    return lambda *t: ops.halo_attention(*t, heads=2, block=4, halo=1), [*maps, *tables]


def mixed():
    tensors = [draw(2, 5, 4), draw(2, 3, 4), draw(2, 3, 4), draw(2, 2), draw(2)]
    return lambda *t: ops.mixed_attention(*t, heads=2, scale=0.7), tensors


def shrink():
    tensors = [draw(1, 3, 6, 6, channels_last=True), draw(3, 1, 3, 3), draw(3)]
    return lambda *t: ops.shrink(*t, stride=2), tensors


def norm():
    return lambda *t: ops.layer_norm(*t, 1e-5), [draw(2, 5, 4), draw(4), draw(4)]


def broadcast():
    return ops.broadcast_context, [draw(2, 5, 4)]


def broadcast_scaled():
    return ops.broadcast_context, [draw(2, 5, 4), draw(4)]


def feed_forward():
    return ops.feed_forward, [draw(2, 5, 4), draw(8, 4), draw(8), draw(4, 8), draw(4)]


FUSED = [halo, mixed, shrink, norm, broadcast, broadcast_scaled, feed_forward]


def fast(operation):
    return backend("recompute" if operation is feed_forward else "triton")


def by_reference(operation):
    function, leaves = operation()
    with backend("reference"):
        result = function(*leaves)
        return result, torch.autograd.grad(result.square().sum(), leaves)


@pytest.mark.parametrize("operation", FUSED)
def test_gradient_checkpointing(operation):
    """Under gradient checkpointing, saved tensors can be read only once."""
    function, leaves = operation()
    with fast(operation):
        result = checkpoint(function, *leaves, use_reentrant=False)
        found = torch.autograd.grad(result.square().sum(), leaves)
    for one, other in zip(found, by_reference(operation)[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("operation", [o for o in FUSED if o is not broadcast])
def test_second_derivatives_are_refused(operation, watched):
    """The error names the remedy, also for a linear loss and torch.autograd.grad."""
    function, leaves = operation()
    with fast(operation):
        if watched and operation in (halo, mixed, shrink):
            with FlopCounterMode(display=False):
                result = function(*leaves)
        else:
            result = function(*leaves)
        with pytest.raises(RuntimeError, match=r"interlayer.backend\('reference'\)"):
            torch.autograd.grad(result.sum(), leaves, create_graph=True)


def test_second_derivatives_of_broadcasting():
    """The operation is linear, so second derivatives come from the operations around it."""
    function, (x,) = broadcast()
    found = []
    for name in ("reference", "triton"):
        with backend(name):
            (first,) = torch.autograd.grad((function(x) ** 3).sum(), x, create_graph=True)
            found.append(torch.autograd.grad(first.sum(), x)[0])
    torch.testing.assert_close(*found)
    assert found[0].abs().max() > 0.1


@pytest.mark.parametrize("operation", [halo, mixed, shrink, norm, broadcast, broadcast_scaled])
def test_counters_of_flops_and_shapes_alone(operation):
    """A kernel that cannot be traced is replaced by the reference, even if chosen by name."""
    function, leaves = operation()
    expected = by_reference(operation)[0]
    with fast(operation), FlopCounterMode(display=False):
        torch.testing.assert_close(function(*leaves), expected, rtol=1e-3, atol=1e-3)
    with fast(operation):
        assert function(*(t.detach().to("meta") for t in leaves)).shape == expected.shape


@pytest.mark.parametrize("operation", [norm, broadcast, broadcast_scaled])
def test_tracing(operation):
    function, leaves = operation()
    leaves = [t.detach() for t in leaves]
    with fast(operation):
        traced = torch.jit.trace(function, tuple(leaves))
        torch.testing.assert_close(traced(*leaves), function(*leaves), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operation", [norm, broadcast, feed_forward])
def test_transforms_of_functions(operation):
    function, leaves = operation()
    leaves = [t.detach() for t in leaves]
    grad = torch.func.grad(lambda x: function(x, *leaves[1:]).square().sum())(leaves[0])
    torch.testing.assert_close(grad, by_reference(operation)[1][0], rtol=1e-4, atol=1e-4)


def test_export_with_any_number_of_images():
    """Selecting an implementation must not add guards on sizes to the graph."""
    model = timm.create_model("rest_lite", num_classes=3).eval()
    batch = torch.export.Dim("batch", min=1, max=1024)
    exported = torch.export.export(model, (torch.randn(2, 3, 64, 64),), dynamic_shapes=({0: batch},)).module()
    images = torch.randn(5, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(exported(images), model(images), rtol=1e-4, atol=1e-4)


def test_networks_with_gradient_checkpointing():
    """CB_S works in a network that recomputes its blocks."""
    model = interlayer.attach(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2), "cb", scaled=True)
    model = model.to(DEVICE)
    model.set_grad_checkpointing()
    with backend("triton"):
        model(torch.randn(1, 3, 32, 32, device=DEVICE)).sum().backward()
    scales = [p.grad for n, p in model.named_parameters() if n.endswith("scale")]
    assert scales
    assert all(grad.abs().max() > 0 for grad in scales)
