"""Tests of a layer with MRLA-base: the end of the block, the attention, its norm and the sum."""

import pytest
import torch
from operation_tester import DEVICE, DOUBLE, Limit, OperationTester, Sample, draw, sizes, strided
from torch.utils.flop_counter import FlopCounterMode

from interlayer import backend, ops

# batch, channels, height and width; heads; kernel size of q and k; layers, of which the last ones are computed
SHAPES = [
    ((2, 36, 5, 3), 4, 3, 1, 1),
    ((1, 64, 9, 8), 2, 5, 2, 2),
    ((3, 6, 1, 1), 6, 1, 3, 1),
    ((2, 66, 3, 11), 1, 7, 2, 1),
    ((2, 16, 3, 3), 8, 3, 6, 5),
]
KINDS = [
    {"end": True},
    {"end": True, "relu": True},
    {"end": False},
    {"end": True, "end_relu": False, "skip": False},
    {"end": False, "mask": True, "relu": True},
    {"end": True, "mask": True, "training": False},
    {"end": True, "relu": True, "training": False},
]


def make(
    shape=(2, 36, 5, 3), heads=4, size=3, layers=3, computed=1, *, end=True, relu=False, end_relu=True, skip=True,
    mask=False, training=True,
):  # fmt: skip
    """Create a sample in float64: a stage of some layers, of which the first ones are given by their keys and values.

    The means of the maps exceed their standard deviations, to detect cancellation.
    """
    channels = shape[1]
    tensors = {}
    for layer in range(layers - computed):
        tensors[f"key_{layer}"] = draw(*shape[:2], seed=200 + layer)
        tensors[f"value_{layer}"] = 2 + draw(*shape, seed=300 + layer, channels_last=True)
    buffers = {}
    for layer in range(computed):
        seed = 1000 * layer
        tensors |= {
            f"x_{layer}": 3 + 2 * draw(*shape, seed=seed, channels_last=True),
            f"query_weight_{layer}": draw(1, 1, size, seed=seed + 2),
            f"key_weight_{layer}": draw(1, 1, size, seed=seed + 3),
            f"value_weight_{layer}": draw(channels, 1, 3, 3, seed=seed + 4) / 3,
            f"norm_weight_{layer}": 1 + 0.3 * draw(channels, seed=seed + 7),
            f"norm_bias_{layer}": draw(channels, seed=seed + 8),
            f"shortcut_{layer}": draw(*shape, seed=seed + 1, channels_last=True) if end and skip else None,
            f"end_weight_{layer}": 1 + 0.3 * draw(channels, seed=seed + 9) if end else None,
            f"end_bias_{layer}": draw(channels, seed=seed + 10) if end else None,
        }
        buffers |= {
            f"running_mean_{layer}": 0.1 * draw(channels, seed=seed + 11),
            f"running_var_{layer}": 1 + 0.1 * draw(channels, seed=seed + 12).abs(),
            f"end_running_mean_{layer}": 3 + 0.1 * draw(channels, seed=seed + 13),
            f"end_running_var_{layer}": 4 + 0.1 * draw(channels, seed=seed + 14).abs(),
        }
    factor = torch.tensor([0.0, 1.25, 1.25, 0.0, 1.25][: shape[0]], device=DEVICE) if mask else None
    options = {
        "heads": heads, "relu": relu, "end_relu": end_relu, "mask": factor, "training": training,
        "given": layers - computed, "computed": computed,
    }  # fmt: skip
    return Sample(tensors, options, buffers)


def call(sample):
    """Return x' and the attention weights of the computed layers, and all keys and values after the last one."""
    t, o = sample.tensors, sample.options
    keys = tuple(t[f"key_{layer}"] for layer in range(o.get("given_keys", o["given"])))
    values = tuple(t[f"value_{layer}"] for layer in range(o["given"]))
    outputs = []
    for n in range(o["computed"]):
        output, weights, keys, values = run_layer(sample, n, keys, values)
        if len(output) == 1 and output.requires_grad:
            # On a CPU torch's batch norm returns wrong gradients for the strides that the sum of the reference has in
            # batches of one, unless the gradient is channels_last
            output.register_hook(lambda grad: grad.contiguous(memory_format=torch.channels_last))
        outputs += [output, weights]
    return (*outputs, *ops.tensors_of(keys), *ops.tensors_of(values))


def run_layer(sample, n, keys, values):
    """Run the n-th of the computed layers."""
    t, b, o = sample.tensors, sample.buffers, sample.options
    norm = ops.BatchNormArguments(
        t[f"norm_weight_{n}"], t[f"norm_bias_{n}"], b[f"running_mean_{n}"], b[f"running_var_{n}"], o["training"]
    )
    end = None
    if t[f"end_weight_{n}"] is not None:
        end_norm = ops.BatchNormArguments(
            t[f"end_weight_{n}"], t[f"end_bias_{n}"], b[f"end_running_mean_{n}"], b[f"end_running_var_{n}"],
            o["training"],
        )  # fmt: skip
        end = ops.BlockEnd(end_norm, t[f"shortcut_{n}"], o["end_relu"])
    x = t[f"x_{n}"]
    return ops.base_layer(
        x, t[f"query_weight_{n}"], t[f"key_weight_{n}"], t[f"value_weight_{n}"], keys, values, norm,
        None if o["mask"] is None else o["mask"].to(x.dtype), heads=o["heads"], relu=o["relu"], end=end,
    )  # fmt: skip


def contiguous(sample, name):
    return sample.change(**{name: sample.tensors[name].contiguous()})


def five_by_five(sample):
    return sample.change(value_weight_0=torch.ones(36, 1, 5, 5).to(DEVICE))


class TestBaseLayer(OperationTester):
    operation = ops.base_layer
    implementations = ("triton",)
    small = sizes(shape=(2, 4, 3, 2), heads=2, layers=2, end_relu=False)
    precise_shape = sizes(shape=(4, 48, 6, 5), heads=3)
    precisions = ((torch.float32, 1e-4), (torch.bfloat16, 6e-2), (torch.float16, 2e-2))
    autocast_tolerance = 6e-2
    limits = (
        Limit("triton", "the maps must be channels_last", change=lambda s: contiguous(s, "x_0")),
        Limit("triton", "the values must be channels_last", change=lambda s: contiguous(s, "value_0")),
        Limit("triton", "dtype of the map", change=lambda s: s.change(value_1=s.tensors["value_1"].half()), runs=False),
        Limit("triton", "the keys must be contiguous", change=lambda s: s.change(key_0=strided(s.tensors["key_0"]))),
        Limit("triton", "as many keys as values", change=lambda s: s.change(given_keys=1), runs=False),
        Limit("triton", "must be 3x3, got", change=lambda s: five_by_five(s)),
        Limit("triton", "an odd size, got 2", sizes(size=2), runs=False),
        Limit("triton", "divisible by the number of heads", sizes(heads=5), runs=False),
        Limit("triton", "a single value has no variance", sizes(shape=(1, 36, 1, 1)), runs=False),
        Limit("triton", "the map is empty", sizes(shape=(0, 36, 4, 4), training=False)),
    )

    @classmethod
    def cases(cls):
        return [
            pytest.param(
                "triton",
                sizes(shape=shape, heads=heads, size=size, layers=layers, computed=computed, **kind),
                marks=pytest.mark.slow if (number + index) % 9 else [],
            )
            for number, (shape, heads, size, layers, computed) in enumerate(SHAPES)
            for index, kind in enumerate(KINDS)
        ]

    def sample(self, **shape):
        return make(**shape)

    def call(self, sample):
        return call(sample)

    def best_dtype(self, name):
        return DOUBLE

    def tolerance(self, dtype):
        return {"rtol": 1e-8, "atol": 1e-8} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 2e-3}

    def cast(self, sample, dtype):
        """Parameters stay in float32 beside maps in bfloat16."""
        wide = torch.promote_types(dtype, torch.float32)
        names = ("x", "shortcut", "value")
        maps = {n: t.to(dtype) for n, t in sample.tensors.items() if t is not None and n.rsplit("_", 1)[0] in names}
        return sample.map(lambda t: t.to(wide)).change(**maps)

    def context(self, dtype):
        low = dtype.itemsize == 2
        return torch.autocast(DEVICE, dtype if low else torch.bfloat16, enabled=low)


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_any_number_of_layers(monkeypatch, training):
    """Layers beyond those that one launch reads are added up by further launches."""
    from interlayer.ops._triton import base_layer, base_layer_values

    monkeypatch.setattr(base_layer_values, "GROUP", 2)
    monkeypatch.setattr(base_layer, "NEAR", 1)
    tester, sample = TestBaseLayer(), make((2, 12, 3, 2), 3, 3, layers=7, computed=2, relu=True, training=training)
    expected, found = tester.expected(sample), tester.run("triton", tester.cast(sample, DOUBLE))
    for what, value in found.items():
        torch.testing.assert_close(value.double(), expected[what], **tester.tolerance(DOUBLE))


class Stage:
    """Three layers in a row, run by the kernels in float64."""

    def __init__(self, hook=None):
        sample = make((2, 8, 2, 2), 2, 1, layers=1, computed=1)
        self.leaves = {n: t.to(DOUBLE).requires_grad_() for n, t in sample.tensors.items()}
        t = self.leaves
        norm = ops.BatchNormArguments(
            t["norm_weight_0"], t["norm_bias_0"], torch.zeros_like(t["norm_bias_0"]), torch.ones_like(t["norm_bias_0"])
        )
        x, keys, values = t["x_0"], (), ()
        self.outputs, self.memories = [], []
        for layer in range(3):
            with backend("triton"):
                x, _, keys, values = ops.base_layer(
                    x, t["query_weight_0"], t["key_weight_0"], t["value_weight_0"], keys, values, norm, heads=2
                )
            if hook is not None and layer == 1:
                for tensor in (keys[0], values[0], values[1]):
                    tensor.register_hook(hook)
            self.outputs.append(x)
            self.memories.append((keys, values))
        self.output = x
        self.used = [t[n] for n in ("x_0", "query_weight_0", "value_weight_0", "norm_weight_0")]

    def gradients(self, *others, **options):
        weights = draw(*self.output.shape, seed=9).to(self.output)
        with backend("triton"):
            return torch.autograd.grad((self.output * weights).sum(), [*self.used, *others], **options)


@pytest.fixture
def allocated(monkeypatch):
    """Counts the gradients of keys and values that are not written in place."""
    from interlayer.ops._triton import base_layer_values as module

    calls, new_gradient = [], module.new_gradient
    monkeypatch.setattr(module, "new_gradient", lambda tensor: calls.append(tensor.shape) or new_gradient(tensor))
    return calls


def test_gradients_of_the_memory_are_added_in_place(allocated):
    """Only the last of three layers allocates gradients: of three keys and three values."""
    Stage().gradients()
    assert len(allocated) == 6


@pytest.mark.parametrize(
    "kept",
    [
        lambda grad: grad,
        pytest.param(lambda grad: grad.detach(), marks=pytest.mark.slow),
        pytest.param(lambda grad: grad[:1], marks=pytest.mark.slow),
    ],
)
def test_a_gradient_that_a_hook_keeps_is_not_changed(kept, allocated):
    """Earlier layers may not add their part to a tensor that somebody else holds, nor to one that shares its memory."""
    expected = Stage().gradients()
    del allocated[:]
    seen = []
    stage = Stage(lambda grad: seen.append((kept(grad), kept(grad).clone())))
    found = stage.gradients()
    assert len(seen) == 3
    assert len(allocated) > 6, "the gradients that are kept are copied"
    for grad, copy in seen:
        assert torch.equal(grad, copy)
    for grad, wanted in zip(found, expected, strict=True):
        assert torch.equal(grad, wanted)


def test_gradients_that_are_asked_for_are_not_changed():
    """`torch.autograd.grad` returns the gradient of a value as it was when it reached the value."""
    stage = Stage()
    keys, values = stage.memories[1]
    *together, grad_key, grad_value = stage.gradients(keys[0], values[0], retain_graph=True)
    alone = torch.autograd.grad(
        (stage.output * draw(*stage.output.shape, seed=9).to(stage.output)).sum(), [keys[0], values[0]],
        retain_graph=True,
    )  # fmt: skip
    assert torch.equal(grad_key, alone[0])
    assert torch.equal(grad_value, alone[1])
    for grad, wanted in zip(together, stage.gradients(), strict=True):
        assert torch.equal(grad, wanted)


def test_gradients_given_by_the_caller_are_not_changed():
    """A gradient that one backward pass returned can be given to another one."""
    stage = Stage()
    _, values = stage.memories[1]
    *_, grad_value = stage.gradients(values[0], retain_graph=True)
    before = grad_value.clone()
    torch.autograd.backward([stage.outputs[1], values[0]], [torch.rand_like(stage.output), grad_value])
    assert torch.equal(grad_value, before)


def test_a_second_backward_pass_computes_the_same():
    """Nothing that a backward pass overwrites is needed by another one through the same graph."""
    stage = Stage()
    first = stage.gradients(retain_graph=True)
    for grad, wanted in zip(stage.gradients(), first, strict=True):
        assert torch.equal(grad, wanted)


def test_the_reference_runs_where_operators_are_traced():
    """A counter of FLOPs sees the convolution of the values, even if the kernel was chosen by name."""
    sample = TestBaseLayer().cast(make((2, 8, 3, 2), 2, layers=2), DOUBLE)
    with backend("triton"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        found = call(sample.map(torch.clone))
    assert counter.get_total_flops() >= 2 * 9 * sample.tensors["x_0"].numel()
    with backend("reference"), torch.no_grad():
        torch.testing.assert_close(found, call(sample.map(torch.clone)))


def test_second_derivatives_are_refused():
    """The error names the remedy."""
    stage = Stage()
    with pytest.raises(RuntimeError, match=r"interlayer.backend\('reference'\)"):
        stage.gradients(create_graph=True)
