"""Tests of a layer with MRLA-light: the end of the block, the attention, its norm and the sum."""

import pytest
import torch
from operation_tester import DEVICE, DOUBLE, Limit, OperationTester, Sample, draw, sizes

from interlayer import ops

# batch, channels, height and width; heads; kernel size of q and k
SHAPES = [
    ((2, 36, 5, 3), 4, 3),
    ((1, 64, 9, 8), 2, 5),
    ((3, 6, 1, 1), 6, 1),
    ((2, 130, 4, 70), 1, 7),
    ((5, 16, 7, 7), 16, 3),
]
KINDS = [
    {"end": True},
    {"end": True, "published": True},
    {"end": True, "projected": True},
    {"end": True, "published": True, "projected": True, "mask": True},
    {"end": False},
    {"end": True, "relu": False, "skip": False, "memory": False},
    {"end": True, "gated": False, "memory": False, "mask": True},
    {"end": False, "mask": True, "decay": False},
    {"end": True, "training": False},
    {"end": True, "published": True, "training": False, "mask": True},
]


def make(
    shape=(2, 36, 5, 3), heads=4, size=3, *, end=True, published=False, relu=True, skip=True, memory=True, decay=True,
    gated=True, mask=False, training=True, projected=False,
):  # fmt: skip
    """Create a sample in float64. The means of the maps exceed their standard deviations, to detect cancellation."""
    channels = shape[1]
    shortcut = draw(*shape, seed=1, channels_last=True) if end and skip else None
    tensors = {
        "x": 3 + 2 * draw(*shape, seed=0, channels_last=True),
        "query_weight": draw(1, 1, size, seed=2) if gated else None,
        "key_weight": draw(1, 1, size, seed=3) if gated else None,
        "value_weight": draw(channels, 1, 3, 3, seed=4) / 3,
        "previous": 2 + draw(*shape, seed=5, channels_last=True) if memory and not published else None,
        "decay": draw(channels, seed=6) if memory and decay else None,
        "norm_weight": 1 + 0.3 * draw(channels, seed=7),
        "norm_bias": draw(channels, seed=8),
        "shortcut": shortcut,
        "end_weight": 1 + 0.3 * draw(channels, seed=9) if end else None,
        "end_bias": draw(channels, seed=10) if end else None,
    }
    buffers = {
        "running_mean": 0.1 * draw(channels, seed=11),
        "running_var": 1 + 0.1 * draw(channels, seed=12).abs(),
        "end_running_mean": 3 + 0.1 * draw(channels, seed=13),
        "end_running_var": 4 + 0.1 * draw(channels, seed=14).abs(),
    }
    factor = torch.tensor([0.0, 1.25, 1.25, 0.0, 1.25][: shape[0]], device=DEVICE) if mask else None
    options = {
        "heads": heads, "relu": relu, "mask": factor, "training": training, "published": published,
        "projected": projected,
    }  # fmt: skip
    return Sample(tensors, options, buffers)


def call(sample):
    t, b, o = sample.tensors, sample.buffers, sample.options
    training = o["training"]
    norm = ops.BatchNormArguments(t["norm_weight"], t["norm_bias"], b["running_mean"], b["running_var"], training)
    end = None
    if t["end_weight"] is not None:
        end_norm = ops.BatchNormArguments(
            t["end_weight"], t["end_bias"], b["end_running_mean"], b["end_running_var"], training
        )
        source = None
        if o["projected"]:  # the shortcut is 2 z' - 3
            scale = torch.tensor([[1.5], [2.0], [2.0], [-3.0]], device=t["x"].device).expand(4, t["x"].shape[1])
            table = scale.to(torch.promote_types(t["x"].dtype, torch.float32)).contiguous()
            source = (t["shortcut"].detach() + 3) / 2, table
        end = ops.BlockEnd(end_norm, t["shortcut"], o["relu"], source)
    previous = t["shortcut"] if o["published"] else t["previous"]
    mask = o["mask"]
    output, memory, gate = ops.light_layer(
        t["x"], t["query_weight"], t["key_weight"], t["value_weight"], previous, t["decay"], norm,
        None if mask is None else mask.to(t["x"].dtype), heads=o["heads"], end=end,
    )  # fmt: skip
    return (output, memory) if gate is None else (output, memory, gate)


class TestLightLayer(OperationTester):
    operation = ops.light_layer
    implementations = ("triton",)
    small = sizes(shape=(2, 4, 3, 2), heads=2, relu=False)
    precise_shape = sizes(shape=(4, 48, 6, 5), heads=3)
    precisions = ((torch.float32, 1e-4), (torch.bfloat16, 6e-2), (torch.float16, 2e-2))
    autocast_tolerance = 6e-2
    limits = (
        Limit("triton", "the maps must be channels_last", change=lambda s: s.change(x=s.tensors["x"].contiguous())),
        Limit("triton", "one shape and dtype", change=lambda s: s.change(previous=s.tensors["previous"][:1])),
        Limit("triton", "one shape and dtype", change=lambda s: s.change(shortcut=s.tensors["shortcut"].double())),
        Limit("triton", "must be 3x3, got", change=lambda s: s.change(value_weight=torch.ones(36, 1, 5, 5).to(DEVICE))),
        Limit("triton", "an odd size, got 2", sizes(size=2), runs=False),
        Limit("triton", "divisible by the number of heads", sizes(heads=5), runs=False),
        Limit("triton", "both q and k, or neither", change=lambda s: s.change(key_weight=None)),
        Limit("triton", "a single value has no variance", sizes(shape=(1, 36, 1, 1)), runs=False),
        Limit("triton", "of floating point, got", change=lambda s: s.map(lambda t: t.long()), runs=False),
        Limit("triton", "the map is empty", sizes(shape=(0, 36, 4, 4), training=False)),
        Limit(
            "triton",
            "masks must be contiguous",
            change=lambda s: s.change(running_mean=s.buffers["running_mean"].new_zeros(36, 2)[:, 0]),
        ),
    )

    @classmethod
    def cases(cls):
        return [
            pytest.param(
                "triton",
                sizes(shape=shape, heads=heads, size=size, **kind),
                marks=pytest.mark.slow if (number + index) % 5 or shape[3] > 50 else [],
            )
            for number, (shape, heads, size) in enumerate(SHAPES)
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
        names = ("x", "shortcut", "previous")
        maps = {name: t.to(dtype) for name, t in sample.tensors.items() if t is not None and name in names}
        return sample.map(lambda t: t.to(wide)).change(**maps)

    def context(self, dtype):
        low = dtype.itemsize == 2
        return torch.autocast(DEVICE, dtype if low else torch.bfloat16, enabled=low)

    @pytest.mark.parametrize("training", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_a_tall_map_has_many_segments(self, training, monkeypatch):
        map_shape = pytest.importorskip("interlayer.ops._triton.map_shape")
        monkeypatch.setattr(map_shape, "PROGRAMS", 40)
        map_shape.map_shape.cache_clear()
        sample = make(shape=(1, 16, 72, 2), heads=4, training=training)
        assert map_shape.MapShape.of(sample.tensors["x"]).tiles.segments == 9
        found = self.run("triton", self.cast(sample, DOUBLE))
        self.assert_near(found, self.expected(sample), 1e-8 if DEVICE == "cpu" else 1e-3)
        map_shape.map_shape.cache_clear()


@pytest.mark.parametrize("batch", [1, 8, 16, 256])
def test_segments_fill_a_gpu_and_their_sums_fit(batch, monkeypatch):
    map_shape = pytest.importorskip("interlayer.ops._triton.map_shape")
    monkeypatch.setattr(map_shape, "PROGRAMS", 528)
    for channels, height, width in [(256, 200, 304), (512, 100, 152), (1024, 50, 76), (2048, 25, 38), (256, 56, 56)]:
        tiles = map_shape._tiles(batch, channels, height, width)
        assert batch * tiles.segments <= map_shape.bound_of_sums(batch, channels, width)
        assert tiles.rows * tiles.segments >= height
        if batch >= 8:
            assert tiles.groups * tiles.segments * tiles.chunks >= (256 if height == 56 else 400)


@pytest.mark.parametrize("kind", [{}, {"relu": False}, {"published": True, "projected": True}])
def test_the_average_has_a_gradient_where_that_of_a_pixel_is_zero(kind):
    """The backward pass tells by the sign of a zero where the ReLU was: a wrong one would lose the gradient of y."""
    sample = make(**kind)
    found = {}
    for name in ("triton", "reference"):
        tensors = {n: None if t is None else t.detach().requires_grad_() for n, t in sample.tensors.items()}
        with ops.backend(name):
            gate = call(sample.change(**tensors))[2]
            found[name] = torch.autograd.grad(-gate.sum(), tensors["x"])[0]
    assert found["reference"].abs().max() > 0
    torch.testing.assert_close(found["triton"], found["reference"], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_only_pixels_that_the_relu_stopped_are_dead(dtype):
    dead_pixels = pytest.importorskip("dead_pixels")
    wide = torch.promote_types(dtype, torch.float32)
    grads = torch.tensor([0.0, -0.0, 1e-9, -1e-9, 3.0, -3.0, float("inf"), -0.0], device=DEVICE, dtype=wide)
    alive = torch.tensor([1, 1, 1, 1, 1, 0, 1, 0], device=DEVICE, dtype=torch.int32)
    stored, dead = torch.empty(8, device=DEVICE, dtype=dtype), torch.empty(8, device=DEVICE, dtype=torch.int32)
    dead_pixels.run(grads, alive, stored, dead)
    assert dead.tolist() == (1 - alive).tolist()
    torch.testing.assert_close(stored.to(wide), (grads * alive).to(dtype).to(wide))
