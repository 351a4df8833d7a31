"""A table of training steps, for the benchmarks of this folder: time, memory and inference, and ratios to the first."""

from collections.abc import Callable

import torch
from torch import nn

import interlayer
from interlayer.analysis import Cost, Setting, measure


def print_head(device: str) -> None:
    if device == "cuda":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    print(f"{'model':24} {'':18}" + "".join(f" {what:>11} {'ratio':>6}" for what in ("step", "memory", "inference")))


def print_step(
    name: str, make: Callable[[], nn.Module], setting: Setting, first: Cost | None, backend: str = "auto"
) -> Cost | None:
    """Measure one model and print its line; what it cost, or None where it could not run, which the line then says."""
    how = ("compiled" if setting.compile else "eager") + ("" if backend == "auto" else f", {backend}")
    try:
        with interlayer.backend(backend):
            cost = measure(make(), setting)
    except torch.OutOfMemoryError:
        print(f"{name:24} {how:18} does not fit", flush=True)
        return None
    finally:
        if setting.device == "cuda":
            torch.cuda.empty_cache()
    first = first or cost
    figures = [
        (cost.train_seconds * 1e3, "ms", cost.train_seconds / first.train_seconds),
        (cost.memory / 2**30, "GiB", cost.memory / first.memory),
        (cost.inference_seconds * 1e3, "ms", cost.inference_seconds / first.inference_seconds),
    ]
    columns = "".join(f" {value:7.2f} {unit:3} {ratio:6.3f}" for value, unit, ratio in figures)
    print(f"{name:24} {how:18}{columns}", flush=True)
    return cost
