"""Tests of a layer with MRLA-light in a transformer: the norms, the attention over the grid and the sum."""

import pytest
import torch
from operation_tester import DEVICE, DOUBLE, Limit, OperationTester, Sample, draw, sizes

from interlayer import backend, ops
from interlayer.ops._triton import light_tokens

# batch, channels, grid and prefix tokens; heads; kernel size of q and k
SHAPES = [
    ((2, 36, (5, 3), 1), 4, 3),
    ((1, 48, (3, 9), 2), 2, 5),
    ((3, 6, (1, 1), 0), 6, 1),
    ((2, 130, (2, 7), 1), 1, 7),
]
KINDS = [
    {},
    {"previous": "shortcut", "add_prefix": True},
    {"previous": "none", "mask": True},
    {"previous": "shortcut", "add_prefix": True, "mask": True, "decay": False},
    {"memory": False},
    {"memory": False, "gated": False, "mask": True, "add_prefix": True},
    {"decay": False},
]


def make(
    shape=(2, 36, (5, 3), 1), heads=4, size=3, *, previous="attention", memory=True, decay=True, gated=True,
    mask=False, add_prefix=False,
):  # fmt: skip
    """Create a sample in float64. The means of the tokens exceed their standard deviations, to detect cancellation."""
    batch, channels, grid, prefix = shape
    tokens = prefix + grid[0] * grid[1]
    kind = previous if memory else "none"
    earlier = None
    if kind == "attention":
        earlier = 2 + draw(batch, channels, *grid, seed=5, channels_last=True)
    elif kind == "shortcut":
        earlier = 2 + draw(batch, tokens, channels, seed=5)
    tensors = {
        "x": 3 + 2 * draw(batch, tokens, channels, seed=0),
        "query_weight": draw(1, 1, size, seed=2) if gated else None,
        "key_weight": draw(1, 1, size, seed=3) if gated else None,
        "value_weight": draw(channels, 1, 3, 3, seed=4) / 3,
        "previous": earlier,
        "decay": draw(channels, seed=6) if memory and decay else None,
        "norm_weight": 1 + 0.3 * draw(channels, seed=7),
        "norm_bias": draw(channels, seed=8),
        "previous_weight": 1 + 0.3 * draw(channels, seed=9) if memory else None,
        "previous_bias": draw(channels, seed=10) if memory else None,
    }
    factor = torch.tensor([0.0, 1.25, 1.25][:batch], device=DEVICE) if mask else None
    return Sample(tensors, {"heads": heads, "grid": grid, "prefix": prefix, "mask": factor, "add_prefix": add_prefix})


def call(sample):
    t, o = sample.tensors, sample.options
    norm = ops.LayerNormArguments(t["norm_weight"], t["norm_bias"], 1e-6)
    memory = None
    if t["previous_weight"] is not None:
        memory = ops.LayerNormArguments(t["previous_weight"], t["previous_bias"], 1e-5)
    mask = o["mask"]
    result, output, gate = ops.light_tokens(
        t["x"], t["query_weight"], t["key_weight"], t["value_weight"], t["previous"], t["decay"], norm, memory,
        None if mask is None else mask.to(t["x"].dtype),
        heads=o["heads"], grid=o["grid"], prefix=o["prefix"], add_prefix=o["add_prefix"],
    )  # fmt: skip
    return (result, output) if gate is None else (result, output, gate)


class TestLightTokens(OperationTester):
    operation = ops.light_tokens
    implementations = ("triton",)
    small = sizes(shape=(2, 6, (2, 3), 1), heads=2)
    precisions = ((torch.bfloat16, 3e-2), (torch.float16, 4e-3))
    precise_shape = sizes(shape=(2, 64, (5, 4), 1), previous="attention")
    limits = (
        Limit("triton", "must be 3x3", change=lambda s: s.change(value_weight=draw(36, 1, 5, 5).float())),
        Limit("triton", "an odd size", sizes(size=2), runs=False),
        Limit("triton", "divisible by the number of heads", sizes(heads=5), runs=False),
        Limit("triton", "both q and k, or neither", sizes(memory=False), lambda s: s.change(key_weight=None)),
        Limit("triton", "of floating point, got", change=lambda s: s.map(lambda t: t.long()), runs=False),
        Limit("triton", "there are no tokens", sizes(shape=(0, 36, (5, 3), 1), previous="none")),
        Limit("triton", "must fill the grid", change=lambda s: s.change(grid=(5, 4)), runs=False),
        Limit(
            "triton",
            "at most 4096 channels",
            sizes(shape=(1, 4100, (1, 1), 0), memory=False),
        ),
        Limit(
            "triton",
            "the shape of the tokens or of their map",
            change=lambda s: s.change(previous=s.tensors["previous"][:, :, :1, :1]),
        ),
        Limit(
            "triton",
            "without q and k there is no memory",
            change=lambda s: s.change(query_weight=None, key_weight=None),
        ),
        Limit(
            "triton",
            "parameters and masks must be contiguous",
            change=lambda s: s.change(norm_bias=s.tensors["norm_bias"].new_zeros(36, 2)[:, 0]),
        ),
    )

    @classmethod
    def cases(cls):
        return [
            pytest.param(
                "triton",
                sizes(shape=shape, heads=heads, size=size, **kind),
                marks=pytest.mark.slow if (number + index) % 6 else [],
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
        """Parameters stay in float32 beside tokens in bfloat16."""
        wide = torch.promote_types(dtype, torch.float32)
        tokens = {n: t.to(dtype) for n, t in sample.tensors.items() if t is not None and n in ("x", "previous")}
        return sample.map(lambda t: t.to(wide)).change(**tokens)

    def context(self, dtype):
        low = dtype.itemsize == 2
        return torch.autocast(DEVICE, dtype if low else torch.bfloat16, enabled=low)

    @pytest.mark.parametrize(("batch", "heads"), [(2, 4), (2, 12), (17, 4)], ids=["small", "small heads", "large"])
    def test_without_gradients(self, batch, heads):
        """Without a backward pass, small batches compute the gates where they are read if a tile contains the head."""
        sample = make(shape=(batch, 16 if heads == 4 else 36, (2, 3), 1), heads=heads)
        self.compare_without_gradients(sample)

    def compare_without_gradients(self, sample):
        with torch.no_grad():
            with backend("reference"):
                expected = self.call(sample)
            with backend("triton"):
                found = self.call(self.cast(sample, DOUBLE))
        for value, other in zip(found, expected, strict=True):
            torch.testing.assert_close(value.double(), other, **self.tolerance(DOUBLE))

    def test_without_gradients_of_many_segments(self, monkeypatch):
        """The gates are computed from more segments, and with more neighbors of a channel, than are loaded at once."""
        monkeypatch.setattr(light_tokens, "PROGRAMS", 64)
        monkeypatch.setattr(light_tokens, "ELEMENTS", 1)
        monkeypatch.setattr(light_tokens, "_sizes", light_tokens._sizes.__wrapped__)  # keeps no sizes for other tests
        sample = make(shape=(2, 16, (7, 4), 1), heads=4, size=7)
        sizes = light_tokens.Sizes.of(self.cast(sample, DOUBLE).tensors["x"], None, 7, 4)
        assert sizes.segments[0] > 16
        assert sizes.depth_inside_tile(4)
        self.compare_without_gradients(sample)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_the_tokens_are_saved_in_the_dtype_of_the_output(compiled):
    """Of float32 tokens under autocast, half the memory is kept. Their gradient may come through O alone."""
    sample = make(shape=(2, 12, (3, 2), 1), heads=4, previous="none").map(lambda t: t.float())
    x = sample.tensors["x"].requires_grad_()
    layer = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks, backend("triton"), torch.autocast(DEVICE, torch.bfloat16):
        _, output, _ = layer(sample)
    patches = x[:, 1:].numel()
    assert {t.dtype for t in saved if t.numel() >= patches} == {torch.bfloat16}
    output.float().square().sum().backward()
    found, x.grad = x.grad, None
    with backend("reference"):
        call(sample)[1].square().sum().backward()
    torch.testing.assert_close(found, x.grad, rtol=0.05, atol=0.05 * x.grad.abs().max().item())
