"""Were these wrong, a block's output, the state it feeds or a gradient would differ from what the reference defines."""

import copy

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn

from interlayer import backend, ops

BACKENDS = ["recompute", "scaled", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DOUBLE = torch.float64 if DEVICE == "cpu" else torch.float32  # the kernels take float64 in the interpreter alone


@pytest.fixture(autouse=True)
def _exact_products():
    """No TF32 on a GPU."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def make(shape=(2, 37, 5, 3), state=5, dtype=DOUBLE, *, norm_layer=nn.BatchNorm2d, memory_format=torch.channels_last):
    torch.manual_seed(0)
    channels = shape[1]
    norm = norm_layer(channels).to(DEVICE, torch.float64 if dtype == torch.float64 else torch.float32)
    with torch.no_grad():
        norm.weight.normal_(1, 0.3)
        norm.bias.normal_()
    x = (3 + 2 * torch.randn(shape)).to(DEVICE, dtype).contiguous(memory_format=memory_format)
    shortcut = torch.randn(shape).to(DEVICE, dtype).contiguous(memory_format=memory_format)
    weight = torch.randn(state, channels, 1, 1).to(DEVICE, norm.weight.dtype) / channels**0.5
    return x, norm, weight, shortcut


def run(name, x, norm, weight, shortcut, relu):
    """Outputs, gradients of every input and moving statistics."""
    norm = copy.deepcopy(norm)
    tensors = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, weight)]
    side = None if shortcut is None else shortcut.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with (
        backend(name),
        torch.autocast(DEVICE, x.dtype if x.dtype.itemsize == 2 else torch.bfloat16, enabled=x.dtype.itemsize == 2),
    ):
        output, projected = ops.residual_end(tensors[0], norm, tensors[1], side, relu=relu)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in (output, projected)]
    torch.autograd.backward((output, projected), grads)
    results = {"output": output.detach(), "projected": projected.detach(), "x": tensors[0].grad, "g1": tensors[1].grad}
    results |= {"gamma": norm.weight.grad, "beta": norm.bias.grad}
    results |= {"mean": norm.running_mean, "variance": norm.running_var, "batches": norm.num_batches_tracked}
    if side is not None:
        results["shortcut"] = side.grad
    return results


SHAPES = [((2, 37, 5, 3), 5), ((1, 64, 9, 8), 32), ((3, 1, 1, 2), 1), ((2, 130, 4, 4), 12), ((2, 16, 7, 7), 128)]
KINDS = [(True, True), (False, True), (False, False)]  # with a ReLU, with a shortcut
CASES = [
    # the interpreter is slow: every shape meets one kind, the others among the slow tests
    pytest.param(name, *shape, *kind, marks=pytest.mark.slow if name == "triton" and number % 3 != index else [])
    for name in BACKENDS
    for number, shape in enumerate(SHAPES)
    for index, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("name", "shape", "state", "relu", "skip"), CASES)
def test_values_and_gradients(name, shape, state, relu, skip):
    """In float64, over odd shapes: more channels than a tile, fewer than one, one pixel more than a tile of rows."""
    x, norm, weight, shortcut = make(shape, state)
    shortcut = shortcut if skip else None
    expected = run("reference", x, norm, weight, shortcut, relu)
    found = run(name, x, norm, weight, shortcut, relu)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if torch.float64 == DOUBLE else {"rtol": 1e-3, "atol": 2e-3}
    for what, value in expected.items():
        torch.testing.assert_close(found[what], value, msg=lambda m, what=what: f"{what}: {m}", **tolerance)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 6e-2), (torch.float16, 2e-2)])
def test_lower_precisions(name, dtype, tolerance):
    """As far from float64 as the dtype allows: the mean of the map is larger than its spread, which must not cancel."""
    if dtype == torch.float16 and DEVICE == "cpu" and name == "recompute":
        pytest.skip("torch has no mixed batch norm of float16 on the CPU")
    x, norm, weight, shortcut = make((4, 48, 6, 5), 12, dtype)
    exact = [t.double() for t in (x, weight, shortcut)]
    expected = run("reference", exact[0], copy.deepcopy(norm).double(), exact[1], exact[2], True)
    found = run(name, x, norm, weight, shortcut, True)
    for what, value in expected.items():
        if what != "batches":
            # by the norm: where a rounded sum changes its sign, ReLU's gradient jumps
            assert (found[what].double() - value).norm() / value.norm() < tolerance, what


def test_norms_of_timm_are_taken():
    """MobileNetV2's last norm is timm's class with no activation; with one its result is no affine map."""
    x, norm, weight, shortcut = make(norm_layer=lambda c: BatchNormAct2d(c, apply_act=False))
    expected = run("reference", x, norm, weight, shortcut, False)
    for what, value in run("recompute", x, norm, weight, shortcut, False).items():
        torch.testing.assert_close(value, expected[what], rtol=1e-4, atol=1e-4)
    _, active, _, _ = make(norm_layer=BatchNormAct2d)
    with backend("recompute"), pytest.raises(ValueError, match="the norm has an activation"):
        ops.residual_end(x, active, weight, shortcut)


@pytest.mark.parametrize(("name", "maps"), [("reference", 3), ("recompute", 2), ("triton", 2)])
def test_the_branch_is_not_kept(name, maps):
    """Were y kept for g1, a step of ResNet-50 with a state would hold a third more memory: x and x' are enough."""
    x, norm, weight, shortcut = make((4, 64, 8, 8), 4)
    kept = {}

    def keep(tensor):
        if tensor.numel() == x.numel():
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), backend(name):
        ops.residual_end(x.requires_grad_(), norm, weight.requires_grad_(), shortcut)
    assert len(kept) == maps


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, n, w, s: (x.contiguous(), n, w, s), "the maps must be channels_last"),
        (lambda x, n, w, s: (x, n.eval(), w, s), "the norm is in eval mode"),
        (lambda x, n, w, s: (x, nn.GroupNorm(1, 37).to(x), w, s), "the norm must be a BatchNorm2d, got GroupNorm"),
        (lambda x, n, w, s: (x, n, w.new_zeros(5, 37, 3, 3), s), "the convolution must be 1x1"),
        (lambda x, n, w, s: (x, n, w.new_zeros(129, 37, 1, 1), s), "at most 128 channels, got 129"),
        (lambda x, n, w, s: (x, n, w, s[:1]), "the shortcut must have the shape"),
    ],
)
def test_limits_are_said(change, reason):
    arguments = change(*make())
    with backend("triton"), pytest.raises(ValueError, match=reason):
        ops.residual_end(*arguments)


def test_beyond_its_limits_the_next_implementation_runs():
    x, norm, weight, shortcut = make()
    expected = run("reference", x.contiguous(), norm, weight, shortcut.contiguous(), True)
    for what, value in run("auto", x.contiguous(), norm, weight, shortcut.contiguous(), True).items():
        torch.testing.assert_close(value, expected[what], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["recompute", "triton"])
def test_second_derivatives_are_refused(name):
    """Written backward passes have no derivative of their own: an error, not a wrong number."""
    x, norm, weight, shortcut = make()
    x.requires_grad_()
    with backend(name):
        output, projected = ops.residual_end(x, norm, weight.requires_grad_(), shortcut)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad((output.sum() + projected.square().sum()), x, create_graph=True)


@pytest.mark.parametrize("where", ["x", "shortcut"])
def test_what_is_not_a_number_stays_so(where):
    """A diverged branch must not look finite behind the ReLU."""
    x, norm, weight, shortcut = make()
    (x if where == "x" else shortcut)[0, 0, 0, 0] = float("nan")
    for name in ("reference", "triton"):
        with backend(name):
            output, _ = ops.residual_end(x, copy.deepcopy(norm), weight, shortcut)
        assert output.isnan().any(), name


def test_weights_and_statistics_in_strides():
    """A transposed weight is read as it is; statistics that are a slice of others are refused."""
    x, norm, weight, shortcut = make()
    strided = weight.flatten(1).t().contiguous().t()[..., None, None]
    expected = run("reference", x, norm, weight, shortcut, True)
    with backend("triton"):
        _, projected = ops.residual_end(x, copy.deepcopy(norm), strided, shortcut)
    torch.testing.assert_close(projected, expected["projected"], rtol=1e-4, atol=1e-4)
    norm.running_mean = torch.zeros(37, 2).to(norm.running_mean)[:, 0]
    with backend("triton"), pytest.raises(ValueError, match="statistics must be contiguous"):
        ops.residual_end(x, norm, weight, shortcut)


def test_one_value_for_each_channel_is_refused_as_torch_refuses_it():
    x, norm, weight, shortcut = make((1, 37, 1, 1))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        ops.residual_end(x, norm, weight, shortcut)
    assert norm.running_var.isfinite().all()


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_a_pointwise_convolution_is_one_when_compiled_too(memory_format):
    """There it is a product over pixels: result and gradients must be the convolution's."""
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
