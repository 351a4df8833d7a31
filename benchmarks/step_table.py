"""A table of training steps, for the benchmarks of this folder: time, memory and inference, and ratios to the first."""

import argparse
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.multiprocessing
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
    parser.add_argument(
        "--together", action="store_true", help="compile the models beside each other, then time one by one"
    )
    return parser


def print_table(arguments: argparse.Namespace, *tables: Callable[[bool], Iterable[Row]]) -> None:
    """Prints tables, mode by mode: a line for each row that a function gives, told whether models are compiled."""
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
        found = [list(rows(mode == "compiled")) for rows in tables]
        if setting.compile and arguments.together:
            _measure_together(found, setting)
            continue
        for rows in found:
            first = None
            for row in rows:
                cost = _measure(row, setting)
                first = first or cost
                _print_step(row, setting, cost, first)


def _measure_together(tables: list[list[Row]], setting: Setting) -> None:
    """Compiles every model in a process of its own, and times one after another when all of them are compiled."""
    context = torch.multiprocessing.get_context("spawn")
    rows = [row for table in tables for row in table]
    pipes = [context.Pipe() for _ in rows]
    processes = [
        context.Process(target=_compile_and_wait, args=(row, setting, theirs))
        for row, (_, theirs) in zip(rows, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    for ours, _ in pipes:
        _received(ours)  # compiled
    costs = []
    for process, (ours, _) in zip(processes, pipes, strict=True):
        if process.is_alive():
            ours.send("go")
        costs.append(_received(ours))
        process.join()
    remaining = iter(costs)
    for table in tables:
        first = None
        for row in table:
            cost = next(remaining)
            first = first or cost
            _print_step(row, setting, cost, first)


def _received(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:  # the process ended, having said why
        return None


def _compile_and_wait(row: Row, setting: Setting, pipe: Any) -> None:
    def wait(what: str) -> None:
        if what == "memory":  # what comes next is measured
            torch.cuda.empty_cache()
            pipe.send("compiled")
            pipe.recv()

    try:
        pipe.send(_measure(row, setting, wait))
    except Exception:
        traceback.print_exc()


def _print_head(device: str) -> None:
    if device == "cuda":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    print(f"{'model':24} {'':18}" + "".join(f" {what:>11} {'ratio':>6}" for what in ("step", "memory", "inference")))


def _measure(row: Row, setting: Setting, progress: Callable[[str], None] = lambda what: None) -> Cost | None:
    """Returns what a model costs, or None where it does not fit."""
    _, make, backend = row
    try:
        with interlayer.backend(backend):
            return measure(make(), setting, progress)
    except torch.OutOfMemoryError:
        return None
    finally:
        if setting.device == "cuda":
            torch.cuda.empty_cache()


def _print_step(row: Row, setting: Setting, cost: Cost | None, first: Cost | None) -> None:
    name, _, backend = row
    mode = "compiled" if setting.compile else "graph" if setting.graph else "eager"
    how = mode + ("" if backend == "auto" else f", {backend}")
    if cost is None or first is None:
        print(f"{name:24} {how:18} does not fit", flush=True)
        return
    figures = [
        (cost.train_seconds * 1e3, "ms", cost.train_seconds / first.train_seconds),
        (cost.memory / 2**30, "GiB", cost.memory / first.memory),
        (cost.inference_seconds * 1e3, "ms", cost.inference_seconds / first.inference_seconds),
    ]
    columns = "".join(f" {value:7.2f} {unit:3} {ratio:6.3f}" for value, unit, ratio in figures)
    print(f"{name:24} {how:18}{columns}", flush=True)
