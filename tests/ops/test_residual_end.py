"""Tests of the end of a residual block: its output, the projected branch and their gradients."""

import copy

import pytest
import torch
from operation_tester import DEVICE, DOUBLE, Limit, OperationTester, Sample, copied, sizes
from torch import nn

from interlayer import backend, ops

BACKENDS = ("triton", "scaled", "recompute")
SHAPES = [((2, 37, 5, 3), 5), ((1, 64, 9, 8), 32), ((3, 1, 1, 2), 1), ((2, 130, 4, 4), 12), ((2, 16, 7, 7), 128)]
KINDS = [(True, True), (False, True), (False, False)]  # with a ReLU, with a shortcut


@pytest.fixture(autouse=True)
def _exact_products():
    """Disable TF32 on a GPU."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def make(shape=(2, 37, 5, 3), state=5, *, relu=True, skip=True):
    """Create a sample in float64. The mean of the map exceeds its standard deviation, to detect cancellation."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(DEVICE)

    channels = shape[1]
    tensors = {
        "x": (3 + 2 * draw(*shape)).contiguous(memory_format=torch.channels_last),
        "norm_weight": 1 + 0.3 * draw(channels),
        "norm_bias": draw(channels),
        "weight": draw(state, channels, 1, 1) / channels**0.5,
        "shortcut": draw(*shape).contiguous(memory_format=torch.channels_last) if skip else None,
    }
    buffers = {
        "running_mean": torch.zeros(channels).to(tensors["x"]),
        "running_var": torch.ones(channels).to(tensors["x"]),
    }
    return Sample(tensors, {"relu": relu}, buffers)


def call(sample):
    x, norm_weight, norm_bias, weight, shortcut = sample.tensors.values()
    options = {name: value for name, value in sample.options.items() if name != "relu"}
    norm = ops.BatchNormArguments(norm_weight, norm_bias, **sample.buffers, **options)
    return ops.residual_end(x, norm, weight, shortcut, relu=sample.options["relu"])


def with_weight(*shape):
    return lambda s: s.change(weight=s.tensors["weight"].new_zeros(shape))


class TestResidualEnd(OperationTester):
    operation = ops.residual_end
    implementations = BACKENDS
    small = sizes(shape=(2, 5, 3, 2), state=3, relu=False)
    precise_shape = sizes(shape=(4, 48, 6, 5), state=12)
    precisions = ((torch.float32, 1e-4), (torch.bfloat16, 6e-2), (torch.float16, 2e-2))
    autocast_tolerance = 6e-2
    limits = (
        Limit("triton", "the maps must be channels_last", change=lambda s: s.change(x=s.tensors["x"].contiguous())),
        Limit("triton", "the norm is in eval mode", change=lambda s: s.change(training=False)),
        Limit("recompute", "the norm is in eval mode", change=lambda s: s.change(training=False)),
        Limit("triton", "the convolution must be 1x1", change=with_weight(5, 37, 3, 3)),
        Limit("triton", "at most 128 channels, got 129", change=with_weight(129, 37, 1, 1)),
        Limit(
            "triton",
            "the shortcut must have the shape",
            change=lambda s: s.change(shortcut=s.tensors["shortcut"][:1]),
        ),
        Limit("triton", "of floating point, got", change=lambda s: s.map(lambda t: t.long()), runs=False),
        Limit(
            "triton",
            "statistics must be contiguous",
            change=lambda s: s.change(running_mean=s.buffers["running_mean"].new_zeros(37, 2)[:, 0]),
        ),
    )

    @classmethod
    def cases(cls):
        # the interpreter is slow: each shape is tested with one kind, and with the others in the slow tests
        return [
            pytest.param(
                name,
                sizes(shape=shape, state=state, relu=relu, skip=skip),
                marks=pytest.mark.slow if name == "triton" and number % 3 != index else [],
            )
            for name in ("recompute", "scaled", "triton")
            for number, (shape, state) in enumerate(SHAPES)
            for index, (relu, skip) in enumerate(KINDS)
        ]

    def sample(self, **shape):
        return make(**shape)

    def call(self, sample):
        return call(sample)

    def best_dtype(self, name):
        return DOUBLE

    def tolerance(self, dtype):
        return {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 2e-3}

    def cast(self, sample, dtype):
        """The norm and the weight of the projection stay in float32 beside maps in bfloat16."""
        wide = torch.promote_types(dtype, torch.float32)
        maps = {name: t.to(dtype) for name, t in sample.tensors.items() if t is not None and name in ("x", "shortcut")}
        return sample.map(lambda t: t.to(wide)).change(**maps)

    def context(self, dtype):
        low = dtype.itemsize == 2
        return torch.autocast(DEVICE, dtype if low else torch.bfloat16, enabled=low)

    def test_lower_precisions(self, name, dtype, tolerance):
        if dtype == torch.float16 and DEVICE == "cpu" and name == "recompute":
            pytest.skip("torch has no mixed batch norm of float16 on the CPU")
        super().test_lower_precisions(name, dtype, tolerance)


def test_the_reference_is_the_modules():
    """Results and running statistics equal those of torch's batch norm."""
    sample = make()
    norm = nn.BatchNorm2d(37, momentum=0.3, eps=1e-3).double().to(DEVICE)
    with torch.no_grad():
        norm.weight.copy_(sample.tensors["norm_weight"])
        norm.bias.copy_(sample.tensors["norm_bias"])
    x, _, _, weight, shortcut = sample.tensors.values()
    for training in (True, False):
        y = norm.train(training)(x)
        expected = (y + shortcut).relu(), nn.functional.conv2d(y, weight)
        with backend("reference"):
            found = call(sample.change(training=training, momentum=0.3, eps=1e-3))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(list(sample.buffers.values()), [norm.running_mean, norm.running_var])


@pytest.mark.parametrize("name", BACKENDS)
def test_momentum_and_eps_are_used(name):
    sample = make().change(momentum=0.4, eps=0.5)
    tester = TestResidualEnd()
    sample = tester.cast(sample, DOUBLE)
    expected = tester.expected(sample)
    for what, value in tester.run(name, sample).items():
        torch.testing.assert_close(value.double(), expected[what], **tester.tolerance(DOUBLE))


@pytest.mark.parametrize(("name", "maps"), [("reference", 3), ("recompute", 2), ("triton", 2)])
def test_the_branch_is_not_kept(name, maps):
    """Only x and x' are saved. Saving y for g1 would increase the memory of ResNet-50 with a state by a third."""
    sample = TestResidualEnd().cast(make((4, 64, 8, 8), 4), DOUBLE)
    x = sample.tensors["x"].requires_grad_()
    for parameter in ("norm_weight", "norm_bias", "weight"):
        sample.tensors[parameter].requires_grad_()
    kept = {}

    def keep(tensor):
        if tensor.numel() == x.numel():
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), backend(name):
        call(sample)
    assert len(kept) == maps


def test_beyond_its_limits_the_next_implementation_runs():
    tester = TestResidualEnd()
    sample = tester.cast(make(), DOUBLE)
    maps = {name: sample.tensors[name].contiguous() for name in ("x", "shortcut")}
    sample = sample.change(**maps)
    expected = tester.run("reference", sample)
    for what, value in tester.run("auto", sample).items():
        torch.testing.assert_close(value, expected[what], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["recompute", "triton"])
def test_second_derivatives_are_refused(name):
    """Custom backward passes are not differentiable and raise an error."""
    sample = TestResidualEnd().cast(make(), DOUBLE)
    x = sample.tensors["x"].requires_grad_()
    for parameter in ("norm_weight", "norm_bias", "weight"):
        sample.tensors[parameter].requires_grad_()
    with backend(name):
        output, projected = call(sample)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad((output.sum() + projected.square().sum()), x, create_graph=True)


@pytest.mark.parametrize("where", ["x", "shortcut"])
def test_what_is_not_a_number_stays_so(where):
    """NaN in the branch is preserved by the ReLU."""
    sample = TestResidualEnd().cast(make(), DOUBLE)
    sample.tensors[where][0, 0, 0, 0] = float("nan")
    for name in ("reference", "triton"):
        with backend(name):
            output, _ = call(sample.map(copied))
        assert output.isnan().any(), name


def test_weights_in_strides():
    """A transposed weight gives the same result."""
    sample = TestResidualEnd().cast(make(), DOUBLE)
    strided = sample.tensors["weight"].flatten(1).t().contiguous().t()[..., None, None]
    with backend("reference"):
        _, expected = call(sample.map(copied))
    with backend("triton"):
        _, projected = call(sample.change(weight=strided))
    torch.testing.assert_close(projected, expected, rtol=1e-4, atol=1e-4)


def test_one_value_for_each_channel_is_refused_as_torch_refuses_it():
    sample = make((1, 37, 1, 1))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        call(sample)
    assert sample.buffers["running_var"].isfinite().all()


@pytest.mark.parametrize("name", ["auto", "scaled", "triton"])
def test_compiled(name):
    """It compiles to one graph that updates the running statistics, with the gradients of the reference."""
    tester = TestResidualEnd()
    sample = tester.cast(make(), DOUBLE)
    expected = tester.expected(sample)

    class Compiled(TestResidualEnd):
        __test__ = False

        def call(self, sample):
            return torch.compile(call, backend="aot_eager", fullgraph=True)(sample)

    for what, value in Compiled().run(name, copy.copy(sample)).items():
        torch.testing.assert_close(value.double(), expected[what], **tester.tolerance(DOUBLE))
