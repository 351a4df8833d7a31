"""Compares the kernels of layers with MRLA-base with their reference in float64, for random arguments.

    python benchmarks/base_layer_cases.py --cases 500

As `light_layer_cases.py`, with one to three layers in a row after up to 40 earlier layers, which are given by their
keys and values. The gradients of these are compared, too.
"""

import random
from typing import Any

import light_layer_cases
import torch
from torch import Tensor

from interlayer import backend, ops


def draw_case(seed: int) -> dict[str, Any]:
    """Returns the options of one case."""
    chance = random.Random(seed)
    depth = chance.choice((1, 4, 8, 16, 24, 32))
    end = chance.random() < 0.7
    return {
        "batch": chance.choice((1, 2, 3, 5, 16)),
        "channels": depth * chance.choice((1, 2, 3, 5, 8)),
        "depth": depth,
        "height": chance.choice((1, 2, 5, 7, 9, 14, 28, 33)),
        "width": chance.choice((2, 3, 7, 8, 14, 17, 28, 33)),
        "size": chance.choice((1, 3, 5, 7)),
        "dtype": chance.choice(light_layer_cases.DTYPES),
        "given": chance.choice((0, 0, 1, 2, 4, 5, 8, 9, 12, 17, 33, 40)),
        "computed": chance.choice((1, 1, 2, 3)),
        "end": end,
        "shortcut": end and chance.random() < 0.9,
        "end_relu": chance.random() < 0.8,
        "relu": chance.random() < 0.5,
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

    tensors: dict[str, Tensor | None] = {}
    for layer in range(case["given"]):
        tensors |= {f"key {layer}": draw(*shape[:2]), f"value {layer}": draw_map(0.5)}
    channels, size = case["channels"], case["size"]
    for layer in range(case["computed"]):
        tensors |= {
            f"x {layer}": draw_map(1.0),
            f"shortcut {layer}": draw_map(0.0) if case["shortcut"] else None,
            f"query weight {layer}": draw(1, 1, size),
            f"key weight {layer}": draw(1, 1, size),
            f"value weight {layer}": draw(channels, 1, 3, 3) / 3,
            f"norm weight {layer}": draw(channels, mean=1.0),
            f"norm bias {layer}": draw(channels),
            f"end weight {layer}": draw(channels, mean=1.0) if case["end"] else None,
            f"end bias {layer}": draw(channels) if case["end"] else None,
        }
    return tensors


def run(name: str, case: dict[str, Any], tensors: dict[str, Tensor | None], wide: bool) -> dict[str, Tensor]:
    """Returns results, gradients and running statistics of one implementation."""
    leaves = {k: (t.double() if wide else t.clone()).requires_grad_() for k, t in tensors.items() if t is not None}
    channels, first = case["channels"], leaves["x 0"]
    dtype = torch.float64 if wide else torch.float32
    mask = (torch.arange(case["batch"], device=first.device) % 3 > 0).to(first.dtype) * 1.5 if case["mask"] else None
    cast = torch.autocast(first.device.type, case["dtype"], enabled=not wide and case["dtype"].itemsize == 2)
    keys = tuple(leaves[f"key {layer}"] for layer in range(case["given"]))
    values = tuple(leaves[f"value {layer}"] for layer in range(case["given"]))
    results, outputs = {}, []

    def norm_of(which: str) -> ops.BatchNormArguments:
        mean, var = (fill((channels,), device=first.device, dtype=dtype) for fill in (torch.zeros, torch.ones))
        results.update({f"{which} mean": mean, f"{which} var": var})
        kind, layer = which.split()
        return ops.BatchNormArguments(
            leaves[f"{kind} weight {layer}"], leaves[f"{kind} bias {layer}"], mean, var, case["training"]
        )

    with backend(name), cast:
        for layer in range(case["computed"]):
            end = None
            if case["end"]:
                end = ops.BlockEnd(norm_of(f"end {layer}"), leaves.get(f"shortcut {layer}"), case["end_relu"])
            output, weights, keys, values = ops.base_layer(
                leaves[f"x {layer}"], leaves[f"query weight {layer}"], leaves[f"key weight {layer}"],
                leaves[f"value weight {layer}"], keys, values, norm_of(f"norm {layer}"), mask,
                heads=channels // case["depth"], relu=case["relu"], end=end,
            )  # fmt: skip
            outputs += [output, weights]
    outputs += [keys[-1], values[-1], values[0]]
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(t.shape, generator=generator).to(t) for t in outputs]
    grads = [g.contiguous(memory_format=torch.channels_last) if g.dim() == 4 else g for g in grads]
    with backend(name):
        torch.autograd.backward(outputs, grads)
    results |= {f"result {number}": t.detach() for number, t in enumerate(outputs)}
    found = results | {f"gradient of {k}": t.grad for k, t in leaves.items() if t.grad is not None}
    return {k.replace("norm bias", "norm_bias"): t for k, t in found.items()}


if __name__ == "__main__":
    light_layer_cases.draw_case = draw_case
    light_layer_cases.make_tensors = make_tensors
    light_layer_cases.run = run
    light_layer_cases.main()
