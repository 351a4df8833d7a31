"""Compares the kernels of layer attention with their references in float64, for random arguments.

    python benchmarks/layer_attention_cases.py                              # on a GPU: 500 cases, 8 processes
    python benchmarks/layer_attention_cases.py --operations base_layer --minutes 3
    python benchmarks/layer_attention_cases.py --only 17 42                 # these cases again, every quantity
    TRITON_INTERPRET=1 python benchmarks/layer_attention_cases.py --device cpu --cases 12 --workers 2

A case draws an operation, shape, dtype, layout, number of layers, heads, kernel size of q and k, reading, masks, frozen
norms, projected shortcuts and prefix tokens. It runs three times: the reference in float64, the reference in the dtype
of the case, and the kernels. For each operation, dtype and quantity (results, gradients, running statistics), the table
shows the root mean square over the cases of the relative error of the kernels beside that of the reference in the same
dtype, and two ratios: "typical" of the geometric means, and "most" of the root mean squares without the worst case of
every twenty. The exit code is 1 if either exceeds two, if a quantity is missing or NaN, or if a case fails. A single
case says less: where one ReLU jumps or a sum of a few terms cancels, either of the two may be lucky by a factor of a
hundred, and a root mean square is that of such a case. The worst cases are listed.

What Triton compiles for (flags, sizes of tiles, sizes of 1 and multiples of 16) is drawn for each of `--variants`
variants, and batch, height and width for each case, so that most of the time is not spent on compilation.
"""

import argparse
import math
import multiprocessing
import random
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from interlayer import backend, ops

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WORST = 12  # cases that are listed
LIMIT = 2.0  # times the error of the reference
UNLUCKY = 20  # cases of which one may be an unlucky one, if there are half as many
CANCELLED = 1000  # times the precision of the dtype: an error of the reference by which a quantity counts as zero
ROUNDING = 3e-6  # an error below it is rounding in float32, in which both accumulate
# Sizes for which Triton compiles the same kernels: a size of 1, odd sizes, and sizes whose product is a multiple of 16
LENGTHS = {"one": (1,), "odd": (3, 5, 7, 9, 15, 21), "even": (4, 8, 12, 20, 28)}
ROWS = {"one": (1,), "two": (2,), "three": (3,), "odd": (5, 7, 9, 13, 19, 27, 33), "even": (8, 12, 20, 28)}
BATCHES = {"one": (1,), "more": (2, 3, 5, 6, 7, 10, 18)}
CHANNELS = (16, 36, 64, 96, 160)
BASE_LAYERS = ((0, 1), (0, 2), (0, 5), (1, 2), (3, 2), (7, 3), (14, 3), (31, 3))  # given and computed layers
KERNEL_SIZES = {"one": (1,), "more": (3, 5, 7, 9)}

Options = dict[str, Any]
Errors = dict[str, tuple[float, float]]  # of the kernels and of the reference, by quantity


@dataclass
class Run:
    """One run of a case: its tensors as leaves of autograd, and running statistics."""

    leaves: dict[str, Tensor | None]
    options: Options
    wide: bool  # in float64
    fused: bool
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def norm(self, name: str, layer: int, training: bool) -> ops.BatchNormArguments:
        weight, bias = self.leaves[f"{name}_weight {layer}"], self.leaves[f"{name}_bias {layer}"]
        assert weight is not None
        assert bias is not None
        dtype = torch.float64 if self.wide else torch.float32
        mean, var = (torch.full_like(weight.detach(), value, dtype=dtype) for value in (0.5, 1.5))
        if training:
            self.buffers |= {f"{name} mean {layer}": mean, f"{name} var {layer}": var}
        return ops.BatchNormArguments(weight, bias, mean, var, training)

    def end(self, layer: int) -> ops.BlockEnd | None:
        """Returns the end of the block, with the norm of a projected shortcut computed as hosts do."""
        kind = self.options["end"]
        if kind == "none":
            return None
        shortcut, source = self.leaves.get(f"shortcut {layer}"), None
        if kind == "projected":
            assert shortcut is not None
            norm = self.norm("shortcut", layer, True)
            if self.fused:
                projected = shortcut
                shortcut, table = ops.normalize_shortcut(projected, norm)
                source = projected.detach(), table
            else:
                statistics = norm.running_mean, norm.running_var
                shortcut = F.batch_norm(shortcut, *statistics, norm.weight, norm.bias, True, norm.momentum, norm.eps)
        end_norm = self.norm("end", layer, self.options["end_training"])
        return ops.BlockEnd(end_norm, shortcut, self.options["end_relu"], source)

    def mask(self, batch: int) -> Tensor | None:
        if not self.options["mask"]:
            return None
        x = self.leaves["x 0"]
        assert x is not None
        return (torch.arange(batch, device=x.device) % 3 > 0).to(x.dtype) * 1.5


class Source:
    """Draws the tensors of a case."""

    def __init__(self, seed: int, device: str, options: Options) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.options = device, options

    def parameter(self, *size: int, mean: float = 0.0, scale: float = 1.0) -> Tensor:
        return (mean + scale * torch.randn(size, generator=self.generator)).to(self.device)

    def map(self, *size: int, mean: float, dtype: torch.dtype | None = None) -> Tensor:
        """Returns maps [B, C, H, W] or tokens [B, N, C] in the layout of the case."""
        x = self.parameter(*size, mean=mean).to(dtype or self.options["dtype"])
        if x.dim() == 3:
            return x if self.options["layout"] == "usual" else x.mT.contiguous().mT
        return x.contiguous(memory_format=torch.channels_last) if self.options["layout"] == "usual" else x

    def norm(self, name: str, layer: int, channels: int) -> dict[str, Tensor | None]:
        weight, bias = self.parameter(channels, mean=1.0, scale=0.3), self.parameter(channels)
        return {f"{name}_weight {layer}": weight, f"{name}_bias {layer}": bias}


def draw_shared(variant: random.Random, free: random.Random, dtype: torch.dtype) -> Options:
    """Returns the options that all operations have."""
    channels = variant.choice(CHANNELS)
    depth = variant.choice([d for d in (1, 4, 8, 12, 16, 32, channels) if channels % d == 0])
    rows, columns = (
        variant.choice(("odd", "odd", "even", "one")),
        variant.choice(("odd", "odd", "even", "two", "three")),
    )
    return {
        "dtype": dtype,
        "batch": free.choice(BATCHES[variant.choice(("more", "more", "more", "one"))]),
        "channels": channels,
        "heads": channels // depth,
        "size": free.choice(KERNEL_SIZES[variant.choice(("more", "more", "more", "one"))]),
        "height": free.choice(LENGTHS[rows]),
        "width": free.choice(ROWS[columns]),
        "layout": free.choice(("usual",) * 9 + ("other",)),
        "mask": variant.random() < 0.3,
        "gradients": free.choice(("maps", "maps", "contiguous", "expanded")),
        "score_gradients": variant.random() < 0.3,
    }


def draw_cnn(variant: random.Random, free: random.Random, dtype: torch.dtype) -> Options:
    """Returns the options that operations in CNNs have in addition."""
    shared = draw_shared(variant, free, dtype)
    end = variant.choice(("shortcut", "shortcut", "projected", "alone", "none"))
    frozen = variant.random() < 0.2
    few = shared["batch"] * shared["height"] * shared["width"] < 8  # their statistics amplify every rounding
    if few and end == "projected":
        end = "shortcut"
    return shared | {
        "end": end,
        "end_relu": variant.random() < 0.8,
        "frozen": frozen,
        "training": not frozen and not few,
        "end_training": not few and (not frozen or variant.random() < 0.3),
    }


def make_cnn_layer(source: Source, layer: int) -> dict[str, Tensor | None]:
    """Returns the tensors of one layer that both mechanisms have."""
    o = source.options
    shape = o["batch"], o["channels"], o["height"], o["width"]
    tensors = {
        f"x {layer}": source.map(*shape, mean=1.0),
        f"value {layer}": source.parameter(o["channels"], 1, 3, 3, scale=1 / 3),
        f"query {layer}": source.parameter(1, 1, o["size"]),
        f"key {layer}": source.parameter(1, 1, o["size"]),
        **source.norm("norm", layer, o["channels"]),
    }
    if o["end"] != "none":
        tensors |= source.norm("end", layer, o["channels"])
    if o["end"] in ("shortcut", "projected"):
        tensors[f"shortcut {layer}"] = source.map(*shape, mean=0.0)
    if o["end"] == "projected":
        tensors |= source.norm("shortcut", layer, o["channels"])
    return tensors


def draw_light_layer(variant: random.Random, free: random.Random, dtype: torch.dtype) -> Options:
    gated = variant.random() < 0.85
    return draw_cnn(variant, free, dtype) | {
        "gated": gated,
        "memory": variant.choice(("none", "attention", "attention", "shortcut")) if gated else "none",
        "decay": variant.random() < 0.8,
        "layers": free.choice((1, 2, 3)),
    }


def make_light_layer(source: Source) -> dict[str, Tensor | None]:
    o, tensors = source.options, {}
    for layer in range(o["layers"]):
        tensors |= make_cnn_layer(source, layer)
        if not o["gated"]:
            tensors |= {f"query {layer}": None, f"key {layer}": None}
        if o["memory"] != "none" and o["decay"]:
            tensors[f"decay {layer}"] = source.parameter(o["channels"])
    if o["memory"] == "attention":
        tensors["previous 0"] = source.map(o["batch"], o["channels"], o["height"], o["width"], mean=0.5)
    return tensors


def run_light_layer(run: Run) -> dict[str, Tensor | None]:
    t, o, results = run.leaves, run.options, {}
    previous = t.get("previous 0")
    for layer in range(o["layers"]):
        end = run.end(layer)
        if o["memory"] == "shortcut":
            previous = None if end is None else end.shortcut
        x, attention, gate = ops.light_layer(
            t[f"x {layer}"], t[f"query {layer}"], t[f"key {layer}"], t[f"value {layer}"], previous,
            t.get(f"decay {layer}"), run.norm("norm", layer, o["training"]), run.mask(o["batch"]),
            heads=o["heads"], end=end,
        )  # fmt: skip
        results |= {f"output {layer}": x, f"gates {layer}": gate}
        previous = attention if o["memory"] == "attention" else None
    return results | {"attention": attention}


def draw_base_layer(variant: random.Random, free: random.Random, dtype: torch.dtype) -> Options:
    earlier, layers = variant.choice(BASE_LAYERS)
    return draw_cnn(variant, free, dtype) | {
        "earlier": earlier,  # layers of which only keys and values are given
        "layers": layers,
        "relu": variant.random() < 0.5,
        "last": variant.random() < 0.5,  # the last layer of a stage: keys and values receive no gradients
    }


def make_earlier(source: Source) -> dict[str, Tensor | None]:
    """Returns the keys and values of earlier layers."""
    o, tensors = source.options, {}
    for layer in range(o["earlier"]):
        tensors[f"earlier_key {layer}"] = source.parameter(o["batch"], o["channels"]).to(o["dtype"])
        tensors[f"earlier_value {layer}"] = source.map(o["batch"], o["channels"], o["height"], o["width"], mean=0.5)
    return tensors


def make_base_layer(source: Source) -> dict[str, Tensor | None]:
    tensors = make_earlier(source)
    for layer in range(source.options["layers"]):
        tensors |= make_cnn_layer(source, layer)
    return tensors


def run_base_layer(run: Run) -> dict[str, Tensor | None]:
    t, o, results = run.leaves, run.options, {}
    keys = tuple(t[f"earlier_key {layer}"] for layer in range(o["earlier"]))
    values = tuple(t[f"earlier_value {layer}"] for layer in range(o["earlier"]))
    for layer in range(o["layers"]):
        x, weights, keys, values = ops.base_layer(
            t[f"x {layer}"], t[f"query {layer}"], t[f"key {layer}"], t[f"value {layer}"], keys, values,
            run.norm("norm", layer, o["training"]), run.mask(o["batch"]),
            heads=o["heads"], relu=o["relu"], end=run.end(layer),
        )  # fmt: skip
        results |= {f"output {layer}": x, f"scores {layer}": weights}
    return results | ({} if o["last"] else name_layers(keys, values))


def name_layers(keys: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    named = {f"keys {layer}": key for layer, key in enumerate(keys)}
    return named | {f"values {layer}": value for layer, value in enumerate(values)}


def draw_light_tokens(variant: random.Random, free: random.Random, dtype: torch.dtype) -> Options:
    options = draw_shared(variant, free, dtype)
    gated = variant.random() < 0.85
    return options | {
        "stream": variant.choice((options["dtype"], torch.float32)),  # dtype of the residual stream
        "gated": gated,
        "memory": variant.choice(("none", "first", "attention", "attention", "shortcut")) if gated else "none",
        "decay": variant.random() < 0.8,
        "layers": free.choice((1, 2, 3)),
        "prefix": variant.choice((0, 1, 1, 2, 5)),
        "add_prefix": variant.random() < 0.4,
    }


def make_light_tokens(source: Source) -> dict[str, Tensor | None]:
    o, tensors = source.options, {}
    tokens = o["prefix"] + o["height"] * o["width"]
    for layer in range(o["layers"]):
        tensors |= {
            f"x {layer}": source.map(o["batch"], tokens, o["channels"], mean=1.0, dtype=o["stream"]),
            f"value {layer}": source.parameter(o["channels"], 1, 3, 3, scale=1 / 3),
            f"query {layer}": source.parameter(1, 1, o["size"]) if o["gated"] else None,
            f"key {layer}": source.parameter(1, 1, o["size"]) if o["gated"] else None,
            f"decay {layer}": source.parameter(o["channels"]) if o["memory"] != "none" and o["decay"] else None,
            **source.norm("norm", layer, o["channels"]),
        }
        if o["memory"] != "none":
            tensors |= source.norm("previous", layer, o["channels"])
        if o["memory"] == "shortcut":
            tensors[f"shortcut {layer}"] = source.map(o["batch"], tokens, o["channels"], mean=1.0, dtype=o["stream"])
    if o["memory"] == "attention":
        tensors["previous 0"] = source.map(o["batch"], o["channels"], o["height"], o["width"], mean=0.5)
    return tensors


def run_light_tokens(run: Run) -> dict[str, Tensor | None]:
    t, o, results = run.leaves, run.options, {}
    previous = t.get("previous 0")
    for layer in range(o["layers"]):
        norm = ops.LayerNormArguments(t[f"norm_weight {layer}"], t[f"norm_bias {layer}"], 1e-6)
        norm_previous = None
        if o["memory"] != "none":
            norm_previous = ops.LayerNormArguments(t[f"previous_weight {layer}"], t[f"previous_bias {layer}"], 1e-5)
        x, attention, gate = ops.light_tokens(
            t[f"x {layer}"], t[f"query {layer}"], t[f"key {layer}"], t[f"value {layer}"],
            t.get(f"shortcut {layer}", previous), t.get(f"decay {layer}"), norm, norm_previous, run.mask(o["batch"]),
            heads=o["heads"], grid=(o["height"], o["width"]), prefix=o["prefix"], add_prefix=o["add_prefix"],
        )  # fmt: skip
        results |= {f"output {layer}": x, f"gates {layer}": gate}
        previous = attention if o["memory"] in ("attention", "first") else None
    return results | {"attention": attention}


def draw_base_tokens(variant: random.Random, free: random.Random, dtype: torch.dtype) -> Options:
    options = draw_shared(variant, free, dtype)
    earlier, layers = variant.choice(BASE_LAYERS)
    return options | {
        "stream": variant.choice((options["dtype"], torch.float32)),
        "earlier": earlier,
        "layers": layers,
        "last": variant.random() < 0.5,
        "prefix": variant.choice((0, 1, 1, 2, 5)),
        "add_prefix": variant.random() < 0.4,
    }


def make_base_tokens(source: Source) -> dict[str, Tensor | None]:
    o, tensors = source.options, make_earlier(source)
    tokens = o["prefix"] + o["height"] * o["width"]
    for layer in range(o["layers"]):
        tensors |= {
            f"x {layer}": source.map(o["batch"], tokens, o["channels"], mean=1.0, dtype=o["stream"]),
            f"value {layer}": source.parameter(o["channels"], 1, 3, 3, scale=1 / 3),
            f"query {layer}": source.parameter(1, 1, o["size"]),
            f"key {layer}": source.parameter(1, 1, o["size"]),
            **source.norm("norm", layer, o["channels"]),
        }
    return tensors


def run_base_tokens(run: Run) -> dict[str, Tensor | None]:
    t, o, results = run.leaves, run.options, {}
    keys = tuple(t[f"earlier_key {layer}"] for layer in range(o["earlier"]))
    values = tuple(t[f"earlier_value {layer}"] for layer in range(o["earlier"]))
    for layer in range(o["layers"]):
        norm = ops.LayerNormArguments(t[f"norm_weight {layer}"], t[f"norm_bias {layer}"], 1e-6)
        x, weights, keys, values = ops.base_tokens(
            t[f"x {layer}"], t[f"query {layer}"], t[f"key {layer}"], t[f"value {layer}"], keys, values, norm,
            run.mask(o["batch"]), heads=o["heads"], grid=(o["height"], o["width"]), prefix=o["prefix"],
            add_prefix=o["add_prefix"],
        )  # fmt: skip
        results |= {f"output {layer}": x, f"scores {layer}": weights}
    return results | ({} if o["last"] else name_layers(keys, values))


@dataclass(frozen=True)
class Kind:
    """How the cases of an operation are drawn and run."""

    draw: Callable[[random.Random, random.Random, torch.dtype], Options]
    make: Callable[[Source], dict[str, Tensor | None]]
    run: Callable[[Run], dict[str, Tensor | None]]


KINDS = {
    "light_layer": Kind(draw_light_layer, make_light_layer, run_light_layer),
    "base_layer": Kind(draw_base_layer, make_base_layer, run_base_layer),
    "light_tokens": Kind(draw_light_tokens, make_light_tokens, run_light_tokens),
    "base_tokens": Kind(draw_base_tokens, make_base_tokens, run_base_tokens),
}


@dataclass(frozen=True)
class Case:
    """A case, and how to draw it again."""

    number: int
    operation: str
    variant: int
    seed: int

    def options(self) -> Options:
        variant = random.Random(f"{self.seed} {self.operation} {self.variant}")
        free = random.Random(f"{self.seed} {self.number}")
        return KINDS[self.operation].draw(variant, free, DTYPES[self.variant % len(DTYPES)])


def list_cases(operations: Sequence[str], variants: int, cases: int, seed: int) -> list[Case]:
    return [
        Case(number, operations[number % len(operations)], number // len(operations) % variants, seed)
        for number in range(cases)
    ]


def run_once(operation: str, options: Options, tensors: dict[str, Tensor | None], mode: str) -> dict[str, Tensor]:
    """Returns results, gradients and running statistics of a case: "exact", "plain" or "fused"."""
    wide, dtype = mode == "exact", options["dtype"]
    frozen = re.compile("(norm|end)_(weight|bias) ") if options.get("frozen") else None
    leaves = {}
    for name, tensor in tensors.items():
        leaf = None if tensor is None else (tensor.double() if wide else tensor.clone())
        leaves[name] = None if leaf is None else leaf.requires_grad_(not (frozen and frozen.match(name)))
    device = next(t for t in leaves.values() if t is not None).device
    # The kernels take the usual layout. Another one must give correct results as well, by whatever runs then.
    implementation = "reference" if mode != "fused" else "triton" if options["layout"] == "usual" else "auto"
    run = Run(leaves, options, wide, fused=implementation == "triton")
    with backend(implementation):
        with torch.autocast(device.type, dtype, enabled=not wide and dtype.itemsize == 2):
            results = KINDS[operation].run(run)
        outputs = {n: t for n, t in results.items() if t is not None}
        used = {n: t for n, t in outputs.items() if options["score_gradients"] or not n.startswith(("gates", "scores"))}
        torch.autograd.backward(tuple(used.values()), make_gradients(used, options))
    found = {name: t.detach() for name, t in outputs.items()} | run.buffers
    return found | {f"gradient of {n}": t.grad for n, t in leaves.items() if t is not None and t.grad is not None}


def make_gradients(outputs: dict[str, Tensor], options: Options) -> list[Tensor]:
    """Returns gradients of the outputs, equal in all runs of a case, in one of the layouts that autograd produces."""
    generator, grads = torch.Generator().manual_seed(0), []
    for output in outputs.values():
        if options["gradients"] == "expanded":  # the gradient of a mean
            shape = (*output.shape[:2], *(1,) * (output.dim() - 2))
        else:
            shape = tuple(output.shape)
        grad = torch.randn(shape, generator=generator).to(options["dtype"]).to(output)
        if options["gradients"] == "maps" and grad.dim() == 4:
            grad = grad.contiguous(memory_format=torch.channels_last)
        grads.append(grad.expand(output.shape))
    return grads


def compare(case: Case, device: str) -> tuple[Options, Errors]:
    """Returns the options of a case and its errors relative to float64."""
    options = case.options()
    if device == "cpu":
        # The interpreter is slow, and torch's batch norm returns wrong gradients for some strides of batches of one
        options |= {"batch": 2, "height": min(5, options["height"]), "width": min(9, options["width"])}
        # It truncates to bfloat16 instead of rounding
        options |= {key: torch.float16 for key, value in options.items() if value is torch.bfloat16}
    tensors = KINDS[case.operation].make(Source(case.number, device, options))
    exact, plain, fused = (run_once(case.operation, options, tensors, mode) for mode in ("exact", "plain", "fused"))
    largest = max(t.norm().item() for t in exact.values())
    errors = {}
    for what, value in exact.items():
        if what not in plain:
            continue
        size, name = value.norm().item(), what
        difference = (plain[what].double() - value).norm().item()
        # As that of q in the first layer of a stage with MRLA-base, or where its terms cancel to less than rounding
        # leaves of them: then nothing but chance decides which error is larger.
        vanishes = size < 1e-6 * largest or difference > CANCELLED * torch.finfo(options["dtype"]).eps * size
        if vanishes:
            size, name = largest, f"vanishing {what}"
        other = difference / size
        one = 0.0 if vanishes else math.inf  # of a gradient that the kernels do not return
        if what in fused:
            one = ((fused[what].double() - value).norm() / size).item()
        if math.isfinite(other):  # the reference overflows in float16 where the kernels do not
            errors[name] = one, other
    return options, errors


def compare_group(cases: list[Case], device: str) -> list[tuple[Case, Options, Errors | str]]:
    """Runs the cases of one variant in a worker. An error is returned as text."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(1)
    found: list[tuple[Case, Options, Errors | str]] = []
    for case in cases:
        try:
            found.append((case, *compare(case, device)))
        except Exception:
            found.append((case, case.options(), traceback.format_exc(limit=-4)))
            if device == "cuda" and is_broken():
                break
    return found


def is_broken() -> bool:
    """Returns whether an error of a kernel made the GPU unusable for this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def typical_ratio(pairs: Sequence[tuple[float, float]], least: float) -> float:
    """Returns the geometric mean of the errors of the kernels, divided by that of the reference.

    Args:
        pairs: the errors of the kernels and of the reference in each case. If one is NaN or infinite, so is the result.
        least: an error below it is rounding, and counts as much.
    """
    return math.exp(statistics.fmean(math.log(ratio(pair, least)) for pair in pairs))


def ratio_of_most(pairs: Sequence[tuple[float, float]], least: float) -> float:
    """Returns the root mean square of the errors of the kernels, divided by that of the reference, of most cases.

    Without the cases of the largest ratios, one of `UNLUCKY`: kernels that are wrong for more of them are not unlucky.
    That no error is NaN or infinite is left to `typical_ratio`.
    """
    kept = sorted(pairs, key=lambda pair: ratio(pair, least))[: len(pairs) - (len(pairs) + UNLUCKY // 2) // UNLUCKY]
    fused, plain = (root_mean_square(values) for values in zip(*kept, strict=True))
    return ratio((fused, plain), least)


def ratio(pair: tuple[float, float], least: float) -> float:
    """Returns the error of the kernels divided by that of the reference, where those below `least` count as much."""
    fused, plain = pair
    return max(fused, least) / max(plain, least)


def floor(name: str, dtype: torch.dtype) -> float:
    """Returns the error of a quantity below which it is rounding."""
    return max(ROUNDING, torch.finfo(dtype).eps) if name.startswith("vanishing") else ROUNDING


def quantity(name: str) -> str:
    """Returns the name of a quantity without the number of its layer."""
    return re.sub(r" \d+$", "", name)


def report(found: list[tuple[Case, Options, Errors]]) -> bool:
    """Prints the errors by operation, dtype and quantity, and the worst cases. Returns whether none is too large."""
    table: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    single = []
    for case, options, errors in found:
        dtype = str(options["dtype"]).removeprefix("torch.")
        for name, (one, other) in errors.items():
            table.setdefault((case.operation, dtype, quantity(name)), []).append((one, other))
            single.append((one / max(other, floor(name, options["dtype"])), case, options, name, one, other))
    good = True
    print(
        f"{'operation':13} {'dtype':9} {'quantity':36} {'count':>5}"
        f" {'kernels':>9} {'reference':>9} {'typical':>7} {'most':>5}"
    )
    for (operation, dtype, what), pairs in sorted(table.items()):
        fused, plain = (root_mean_square(values) for values in zip(*pairs, strict=True))
        least = floor(what, getattr(torch, dtype))
        typical, most = typical_ratio(pairs, least), ratio_of_most(pairs, least)
        beyond = not (typical <= LIMIT and most <= LIMIT)  # NaN as well
        good = good and not beyond
        print(
            f"{operation:13} {dtype:9} {what:36} {len(pairs):5}"
            f" {fused:9.1e} {plain:9.1e} {typical:7.2f} {most:5.2f}" + (" !" if beyond else "")
        )
    print(f"\nThe largest ratios of single cases ({sum(not s[0] <= LIMIT for s in single)} of {len(single)} exceed 2):")
    single.sort(key=lambda s: -s[0] if math.isfinite(s[0]) else -math.inf)
    for ratio, case, options, name, one, other in single[:WORST]:
        print(f"  {ratio:6.2f} case {case.number} {case.operation}: {name} {one:.1e} / {other:.1e} {brief(options)}")
    return good


def brief(options: Options) -> str:
    return " ".join(f"{key}={str(value).removeprefix('torch.')}" for key, value in options.items())


def main() -> None:
    available = [name for name in KINDS if hasattr(ops, name)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", type=int, default=18, help="variants of each operation, see above")
    parser.add_argument("--operations", nargs="+", choices=available, default=available)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of cases to run; prints every quantity")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=10.0, help="report what was done after this time")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    # `--only` draws the cases of a complete run, with the same operations, variants and seed
    count = arguments.cases if arguments.only is None else max(arguments.cases, *(n + 1 for n in arguments.only))
    cases = list_cases(arguments.operations, arguments.variants, count, arguments.seed)
    if arguments.only is not None:
        cases = [cases[number] for number in arguments.only]
    found, failed = run_all(cases, arguments.device, arguments.workers, arguments.minutes)
    if arguments.only is not None:
        for case, options, errors in found:
            print(f"case {case.number} {case.operation} {brief(options)}")
            for name, (one, other) in errors.items():
                times = one / max(other, floor(name, options["dtype"]))
                print(f"  {name:30} {one:9.1e} {other:9.1e} {times:6.2f}")
    good = report(found)
    print(
        f"{len(found)} of {len(cases)} cases compared, {failed} failed; {'all within' if good else 'BEYOND'} the limit"
    )
    sys.exit(0 if good and not failed and found else 1)


def run_all(
    cases: list[Case], device: str, workers: int, minutes: float
) -> tuple[list[tuple[Case, Options, Errors]], int]:
    """Runs cases in several processes, each of which takes one variant at a time. Returns what was found in time."""
    groups: dict[tuple[str, int], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.operation, case.variant), []).append(case)
    start = time.monotonic()
    found: list[tuple[Case, Options, Errors]] = []
    failed = 0
    print(f"{len(cases)} cases of {len(groups)} variants, {workers} processes", flush=True)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:  # ends its processes when it is left
        results = pool.imap_unordered(partial(compare_group, device=device), groups.values())
        for left in reversed(range(len(groups))):
            try:
                group = results.next(max(0.0, min(3600.0, start + 60 * minutes - time.monotonic())))
            except multiprocessing.TimeoutError:
                print(f"stopped after {minutes:g} minutes", flush=True)
                break
            for case, options, errors in group:
                if isinstance(errors, str):
                    failed += 1
                    print(f"case {case.number} {case.operation} failed: {brief(options)}\n{errors}", flush=True)
                else:
                    found.append((case, options, errors))
            seconds = time.monotonic() - start
            print(f"{seconds:5.0f} s: {len(found)} compared, {failed} failed, {left} variants left", flush=True)
    return found, failed


if __name__ == "__main__":
    main()
