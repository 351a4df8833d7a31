"""A table of training steps, for the benchmarks of this folder: time, memory and inference, and ratios to the first."""

import argparse
from collections.abc import Callable, Iterable

import torch
from torch import nn

import interlayer
from interlayer.analysis import Cost, Setting, measure

# "graph" is eager, with the step captured as one CUDA graph: without the processor's time to start its kernels.
MODES = ("eager", "graph", "compiled")

# Label, what makes the model, and the implementation of the operations.
Row = tuple[str, Callable[[], nn.Module], str]


def make_parser(description: str, *, image_size: int, steps: int) -> argparse.ArgumentParser:
    """The options that all these benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=image_size)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    return parser


def print_table(arguments: argparse.Namespace, rows: Callable[[bool], Iterable[Row]]) -> None:
    """A line for each of the `rows`, given whether models are compiled, mode by mode."""
    _print_head(arguments.device)
    for mode in arguments.modes:
        setting = Setting(
            arguments.batch_size,
            arguments.image_size,
            arguments.device,
            "bfloat16",
            channels_last=True,
            compile=mode == "compiled",
            steps=arguments.steps,
            graph=mode == "graph",
        )
        first = None
        for label, make, backend in rows(mode == "compiled"):
            cost = _print_step(label, make, setting, first, backend)
            first = first or cost


def _print_head(device: str) -> None:
    if device == "cuda":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    print(f"{'model':24} {'':18}" + "".join(f" {what:>11} {'ratio':>6}" for what in ("step", "memory", "inference")))


def _print_step(
    name: str, make: Callable[[], nn.Module], setting: Setting, first: Cost | None, backend: str
) -> Cost | None:
    """Measure one model and print its line; what it cost, or None where it could not run, which the line then says."""
    mode = "compiled" if setting.compile else "graph" if setting.graph else "eager"
    how = mode + ("" if backend == "auto" else f", {backend}")
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
