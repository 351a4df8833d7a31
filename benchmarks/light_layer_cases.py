"""Compares the kernels of a layer with MRLA-light with its reference in float64, for random arguments.

    python benchmarks/light_layer_cases.py --cases 500

Draws shape, dtype, heads, kernel size, options, reading and whether the norms are in training. For each dtype, prints
the root mean square over the cases of the error of every result and gradient, relative to float64, beside that of the
reference in the same dtype, which must not be exceeded by more than a factor of two. A single case says less: where a
ReLU jumps or a sum of a few terms cancels, either of the two may be lucky. `--verbose` lists the cases beyond it.
"""

import argparse
import math
import random
import sys
import time
from typing import Any

import torch
from torch import Tensor

from interlayer import backend, ops

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def draw_case(seed: int) -> dict[str, Any]:
    """Returns the options of one case."""
    chance = random.Random(seed)
    depth = chance.choice((1, 4, 8, 16, 24, 32))
    end = chance.random() < 0.7
    gated = chance.random() < 0.85
    return {
        "batch": chance.choice((1, 2, 3, 5, 16)),
        "channels": depth * chance.choice((1, 2, 3, 5, 8)),
        "depth": depth,
        "height": chance.choice((1, 2, 5, 7, 9, 14, 28, 33)),
        "width": chance.choice((2, 3, 7, 8, 14, 17, 28, 33)),
        "size": chance.choice((1, 3, 5, 7)),
        "dtype": chance.choice(DTYPES),
        "end": end,
        "shortcut": end and chance.random() < 0.9,
        "relu": chance.random() < 0.8,
        "gated": gated,
        "memory": chance.choice(("none", "attention", "shortcut")) if gated else "none",
        "decay": chance.random() < 0.8,
        "mask": chance.random() < 0.3,
        "training": chance.random() < 0.8,
    }


def make_tensors(case: dict[str, Any], seed: int, device: str) -> dict[str, Tensor | None]:
    """Returns the inputs of a case: maps in its dtype, parameters in float32."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case["batch"], case["channels"], case["height"], case["width"])

    def draw(*size: int, dtype: torch.dtype = torch.float32, mean: float = 0.0) -> Tensor:
        return (mean + torch.randn(size, generator=generator)).to(device, dtype)

    def draw_map(mean: float) -> Tensor:
        return draw(*shape, dtype=case["dtype"], mean=mean).contiguous(memory_format=torch.channels_last)

    channels, size = case["channels"], case["size"]
    return {
        "x": draw_map(1.0),
        "shortcut": draw_map(0.0) if case["shortcut"] else None,
        "previous": draw_map(0.5) if case["memory"] == "attention" else None,
        "query": draw(1, 1, size) if case["gated"] else None,
        "key": draw(1, 1, size) if case["gated"] else None,
        "value": draw(channels, 1, 3, 3) / 3,
        "decay": draw(channels) if case["memory"] != "none" and case["decay"] else None,
        "norm_weight": draw(channels, mean=1.0),
        "norm_bias": draw(channels),
        "end_weight": draw(channels, mean=1.0) if case["end"] else None,
        "end_bias": draw(channels) if case["end"] else None,
    }


def run(name: str, case: dict[str, Any], tensors: dict[str, Tensor | None], wide: bool) -> dict[str, Tensor]:
    """Returns results, gradients and running statistics of one implementation."""
    leaves = {k: (t.double() if wide else t.clone()).requires_grad_() for k, t in tensors.items() if t is not None}
    x, channels = leaves["x"], case["channels"]
    dtype = torch.float64 if wide else torch.float32
    statistics = [
        torch.zeros(channels, device=x.device, dtype=dtype),
        torch.ones(channels, device=x.device, dtype=dtype),
    ]
    end_statistics = [t.clone() for t in statistics]
    norm = ops.BatchNormArguments(leaves["norm_weight"], leaves["norm_bias"], *statistics, case["training"])
    end = None
    if case["end"]:
        end_norm = ops.BatchNormArguments(leaves["end_weight"], leaves["end_bias"], *end_statistics, case["training"])
        end = ops.BlockEnd(end_norm, leaves.get("shortcut"), case["relu"])
    previous = leaves.get("shortcut") if case["memory"] == "shortcut" else leaves.get("previous")
    mask = (torch.arange(case["batch"], device=x.device) % 3 > 0).to(x.dtype) * 1.5 if case["mask"] else None
    cast = torch.autocast(x.device.type, case["dtype"], enabled=not wide and case["dtype"].itemsize == 2)
    with backend(name), cast:
        outputs = ops.light_layer(
            x, leaves.get("query"), leaves.get("key"), leaves["value"], previous, leaves.get("decay"), norm, mask,
            heads=channels // case["depth"], end=end,
        )  # fmt: skip
    outputs = [t for t in outputs if t is not None]
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(t.shape, generator=generator).to(t) for t in outputs]
    with backend(name):
        torch.autograd.backward(outputs, grads)
    results = {f"result {number}": t.detach() for number, t in enumerate(outputs)}
    results |= {f"gradient of {k}": t.grad for k, t in leaves.items() if t.grad is not None}
    return results | {"mean": statistics[0], "var": statistics[1], "end mean": end_statistics[0]}


def compare(seed: int, device: str) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """Returns a case and, for each quantity, the errors of the kernels and of the reference relative to float64."""
    case = draw_case(seed)
    if case["training"] and case["batch"] * case["height"] * case["width"] < 8:
        case["training"] = False  # statistics of a few pixels amplify every rounding
    tensors = make_tensors(case, seed, device)
    exact = run("reference", case, tensors, wide=True)
    plain = run("reference", case, tensors, wide=False)
    fused = run("triton", case, tensors, wide=False)
    largest = max(t.norm().item() for t in exact.values())
    errors = {}
    for what, value in exact.items():
        size = value.norm().item()
        vanishes = what == "gradient of norm_bias" or size < 1e-6 * largest
        if not vanishes and what in fused and what in plain:
            one, other = (((t[what].double() - value).norm() / size).item() for t in (fused, plain))
            if math.isfinite(other):  # the reference overflows in float16 where the kernels do not
                errors[what] = one, other
    return case, errors


def root_mean_square(values: list[float]) -> float:
    return (sum(value * value for value in values) / len(values)) ** 0.5


def report(errors: dict[tuple[str, str], list[tuple[float, float]]]) -> bool:
    """Prints a table of the errors by dtype and quantity. Returns whether no ratio exceeds two."""
    good = True
    print(f"{'dtype':9} {'quantity':26} {'cases':>5} {'kernels':>9} {'reference':>9} {'ratio':>6}")
    for (dtype, what), pairs in sorted(errors.items()):
        fused, plain = (root_mean_square(list(values)) for values in zip(*pairs, strict=True))
        ratio = fused / max(plain, 3e-6)  # an error below it is rounding in float32, in which both accumulate
        good = good and ratio <= 2
        beyond = "" if ratio <= 2 else " !"
        print(f"{dtype:9} {what:26} {len(pairs):5} {fused:9.1e} {plain:9.1e} {ratio:6.2f}{beyond}")
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--step", type=int, default=1, help="every step-th case, to divide them among processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    errors: dict[tuple[str, str], list[tuple[float, float]]] = {}
    start, done = time.monotonic(), 0
    for seed in range(arguments.first, arguments.cases, arguments.step):
        if time.monotonic() - start > arguments.seconds:
            break
        case, found = compare(seed, arguments.device)
        done += 1
        for what, pair in found.items():
            errors.setdefault((str(case["dtype"]).removeprefix("torch."), what), []).append(pair)
        beyond = {what: f"{one:.1e} / {other:.1e}" for what, (one, other) in found.items() if one > 2 * other}
        if beyond and arguments.verbose:
            print(f"case {seed}: {beyond} {case}", flush=True)
    good = report(errors)
    print(f"{done} cases")
    sys.exit(not good)


if __name__ == "__main__":
    main()
