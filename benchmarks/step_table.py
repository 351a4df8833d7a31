"""A table of training steps, for the benchmarks of this folder: time, memory and inference, and ratios to the first."""

import argparse
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.multiprocessing
from torch import nn

import interlayer
from interlayer.analysis import Cost, Setting, measure

# "graph" is eager, "compiled_graph" compiled, with the step captured as one CUDA graph: without the processor's time to
# start its kernels.
MODES = ("eager", "graph", "compiled", "compiled_graph")

# Label, what makes the model, and the implementation of the operations.
Row = tuple[str, Callable[[], nn.Module], str]


def make_parser(description: str, *, image_size: int, steps: int) -> argparse.ArgumentParser:
    """The options that all these benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=image_size)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--modes", nargs="+", default=list(MODES[:3]), choices=MODES,
        help="graph and compiled_graph time a step as one CUDA graph; default: all but compiled_graph",
    )  # fmt: skip
    parser.add_argument(
        "--together", type=int, default=1, metavar="N",
        help="compile as many models at once, each in a process of its own, then time one by one",
    )  # fmt: skip
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
            compile=mode.startswith("compiled"),
            steps=arguments.steps,
            graph=mode.endswith("graph"),
        )
        found = [list(rows(setting.compile)) for rows in tables]
        if setting.compile and arguments.together > 1:
            _measure_together(found, setting, arguments.together)
            continue
        for rows in found:
            first = None
            for row in rows:
                cost = _measure(row, setting)
                first = first or cost
                _print_step(row, setting, cost, first)


def _measure_together(tables: list[list[Row]], setting: Setting, most: int) -> None:
    """Compiles every model in a process of its own, and times one after another when all of them are compiled.

    Args:
        tables: The rows of each table.
        setting: How the models are measured.
        most: How many are compiled at once. More of them than half of the processor's cores slow each other down.
    """
    context = torch.multiprocessing.get_context("spawn")
    turns = context.Semaphore(most)
    rows = [row for table in tables for row in table]
    pipes = [context.Pipe() for _ in rows]
    processes = [
        context.Process(target=_compile_and_wait, args=(row, setting, turns, theirs))
        for row, (_, theirs) in zip(rows, pipes, strict=True)
    ]
    for process in reversed(processes):  # those that take longest come last in a table
        process.start()
    for _, theirs in pipes:
        theirs.close()
    for row, (ours, _) in zip(rows, pipes, strict=True):
        seconds = _received(ours)
        if seconds is not None:
            print(f"{row[0]:24} compiled in {seconds:.0f} s", flush=True)
    remaining = iter(zip(processes, pipes, strict=True))
    for table in tables:
        first = None
        for row in table:
            process, (ours, _) = next(remaining)
            if process.is_alive():
                ours.send("go")
            cost = _received(ours)
            process.join()
            first = first or cost
            _print_step(row, setting, cost, first)


def _received(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:  # the process ended, having said why
        return None


def _compile_and_wait(row: Row, setting: Setting, turns: Any, pipe: Any) -> None:
    turns.acquire()
    start = time.monotonic()
    has_turn = True

    def wait(what: str) -> None:
        nonlocal has_turn
        if what == "memory":  # what comes next is measured
            torch.cuda.empty_cache()
            turns.release()
            has_turn = False
            pipe.send(time.monotonic() - start)
            pipe.recv()

    try:
        cost = _measure(row, setting, wait)
        if has_turn:  # it did not fit
            pipe.send(None)
        pipe.send(cost)
    except Exception:
        traceback.print_exc()
    finally:
        if has_turn:
            turns.release()


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
    mode = "_".join(name for name, used in (("compiled", setting.compile), ("graph", setting.graph)) if used) or "eager"
    how = mode + ("" if backend == "auto" else f", {backend}")
    if cost is None or first is None:
        print(f"{name:24} {how:18} could not be measured: it does not fit, or the reason is above", flush=True)
        return
    figures = [
        (cost.train_seconds * 1e3, "ms", cost.train_seconds / first.train_seconds),
        (cost.memory / 2**30, "GiB", cost.memory / first.memory),
        (cost.inference_seconds * 1e3, "ms", cost.inference_seconds / first.inference_seconds),
    ]
    columns = "".join(f" {value:7.2f} {unit:3} {ratio:6.3f}" for value, unit, ratio in figures)
    print(f"{name:24} {how:18}{columns}", flush=True)
