"""Tests of a layer with MRLA-base in a transformer: the norm, the attention over the layers and the sum."""

import pytest
import torch
from operation_tester import DEVICE, DOUBLE, Limit, OperationTester, Sample, draw, sizes, strided

from interlayer import ops
from interlayer.ops._triton import base_layer_values, base_tokens

# batch, channels, grid and prefix tokens; heads; kernel size of q and k; layers, of which the last ones are computed
SHAPES = [
    ((2, 36, (5, 3), 1), 4, 3, 1, 1),
    ((1, 48, (3, 9), 2), 2, 5, 2, 2),
    ((3, 6, (1, 1), 0), 6, 1, 3, 1),
    ((2, 66, (2, 17), 1), 1, 7, 2, 1),
    ((2, 8, (3, 2), 1), 4, 3, 6, 5),
]
KINDS = [{}, {"add_prefix": True, "mask": True}]


def make(
    shape=(2, 36, (5, 3), 1), heads=4, size=3, layers=3, computed=1, *, mask=False, add_prefix=False
):  # fmt: skip
    """Create a sample in float64: a stage of some layers, of which the first ones are given by their keys and values.

    The means of the tokens exceed their standard deviations, to detect cancellation.
    """
    batch, channels, grid, prefix = shape
    tensors = {}
    for layer in range(layers - computed):
        tensors[f"key_{layer}"] = draw(batch, channels, seed=200 + layer)
        tensors[f"value_{layer}"] = 2 + draw(batch, channels, *grid, seed=300 + layer, channels_last=True)
    for layer in range(computed):
        seed = 1000 * layer
        tensors |= {
            f"x_{layer}": 3 + 2 * draw(batch, prefix + grid[0] * grid[1], channels, seed=seed),
            f"query_weight_{layer}": draw(1, 1, size, seed=seed + 2),
            f"key_weight_{layer}": draw(1, 1, size, seed=seed + 3),
            f"value_weight_{layer}": draw(channels, 1, 3, 3, seed=seed + 4) / 3,
            f"norm_weight_{layer}": 1 + 0.3 * draw(channels, seed=seed + 7),
            f"norm_bias_{layer}": draw(channels, seed=seed + 8),
        }
    factor = torch.tensor([0.0, 1.25, 1.25][:batch], device=DEVICE) if mask else None
    options = {
        "heads": heads, "grid": grid, "prefix": prefix, "mask": factor, "add_prefix": add_prefix,
        "given": layers - computed, "computed": computed,
    }  # fmt: skip
    return Sample(tensors, options)


def call(sample):
    """Return x' and the attention weights of the computed layers, and all keys and values after the last one."""
    t, o = sample.tensors, sample.options
    keys = tuple(t[f"key_{layer}"] for layer in range(o.get("given_keys", o["given"])))
    values = tuple(t[f"value_{layer}"] for layer in range(o["given"]))
    outputs = []
    for n in range(o["computed"]):
        output, weights, keys, values = run_layer(sample, n, keys, values)
        outputs += [output, weights]
    return (*outputs, *ops.tensors_of(keys), *ops.tensors_of(values))


def run_layer(sample, n, keys, values):
    """Run the n-th of the computed layers."""
    t, o = sample.tensors, sample.options
    x = t[f"x_{n}"]
    norm = ops.LayerNormArguments(t[f"norm_weight_{n}"], t[f"norm_bias_{n}"], 1e-6)
    return ops.base_tokens(
        x, t[f"query_weight_{n}"], t[f"key_weight_{n}"], t[f"value_weight_{n}"], keys, values, norm,
        None if o["mask"] is None else o["mask"].to(x.dtype),
        heads=o["heads"], grid=o["grid"], prefix=o["prefix"], add_prefix=o["add_prefix"],
    )  # fmt: skip


class TestBaseTokens(OperationTester):
    operation = ops.base_tokens
    implementations = ("triton",)
    small = sizes(shape=(2, 4, (3, 2), 1), heads=2, layers=2)
    precise_shape = sizes(shape=(2, 48, (5, 4), 1), heads=3)
    precisions = ((torch.bfloat16, 3e-2),)
    limits = (
        Limit("triton", "the values must be channels_last", change=lambda s: contiguous(s, "value_0")),
        Limit("triton", "the dtype torch.float32", change=lambda s: halved(s, "value_1"), runs=False),
        Limit("triton", "the keys must be contiguous", change=lambda s: s.change(key_0=strided(s.tensors["key_0"]))),
        Limit("triton", "as many keys as values", change=lambda s: s.change(given_keys=1), runs=False),
        Limit("triton", "must fill the grid", change=lambda s: s.change(grid=(5, 4)), runs=False),
    )

    @classmethod
    def cases(cls):
        return [
            pytest.param(
                "triton",
                sizes(shape=shape, heads=heads, size=size, layers=layers, computed=computed, **kind),
                marks=pytest.mark.slow if (number + index) % 6 else [],
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
        """Under autocast, values have the autocast dtype, and the residual stream and the parameters are in float32."""
        wide = torch.promote_types(dtype, torch.float32)
        values = {name: t.to(dtype) for name, t in sample.tensors.items() if name.startswith("value_") and t.dim() == 4}
        values = {name: t for name, t in values.items() if not name.startswith("value_weight")}
        return sample.map(lambda t: t.to(wide)).change(**values)

    def context(self, dtype):
        low = dtype.itemsize == 2
        return torch.autocast(DEVICE, dtype if low else torch.bfloat16, enabled=low)

    def test_autocast(self, name):
        """Under autocast, each gradient has the dtype of its input."""
        sample = self.cast(self.sample(**self.precise_shape), torch.bfloat16)
        found = self.run(name, sample, torch.autocast(DEVICE, torch.bfloat16))
        for input_name, tensor in sample.tensors.items():
            assert found[f"gradient of {input_name}"].dtype == tensor.dtype
        self.assert_near(found, self.expected(sample), self.autocast_tolerance)

    def test_any_number_of_layers(self, monkeypatch):
        """Layers beyond those that one launch reads are added before, in as many launches as it takes."""
        sample = make(shape=(1, 8, (2, 2), 1), heads=2, layers=6)
        expected = self.expected(sample)
        monkeypatch.setattr(base_tokens, "NEAR", 1)
        monkeypatch.setattr(base_layer_values, "GROUP", 2)
        for what, value in self.run("triton", self.cast(sample, DOUBLE)).items():
            torch.testing.assert_close(value.double(), expected[what], **self.tolerance(DOUBLE))


def contiguous(sample, name):
    return sample.change(**{name: sample.tensors[name].contiguous()})


def halved(sample, name):
    return sample.change(**{name: sample.tensors[name].half()})
