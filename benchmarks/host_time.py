"""The time that Python takes for a block with layer attention, which limits small batches in eager mode.

    python benchmarks/host_time.py                # on any machine: everything but the launch of kernels is done
    python benchmarks/host_time.py --models deit_small_mrla_light --batch-size 8

Kernels are neither compiled nor launched, so that a machine without a GPU measures the same Python code, under autocast
and without gradients. The body of the block, which the plain network has too, is left out.
"""

import argparse
import statistics
import timeit
from typing import Any
from unittest import mock

import torch
from kernel_launches import kernel_modules

from interlayer.hosts.block import AttachedBlock
from interlayer.models.build import build_network
from interlayer.ops._triton import runtime

MODELS = ("resnet50_mrla_light", "resnet50_mrla_base", "deit_small_mrla_light", "deit_small_mrla_base")


class _Unlaunched:
    """A kernel that is compiled to nothing."""

    def __init__(self, kernel: Any) -> None:
        self.fn, self.arg_names = kernel.fn, kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **constants: mock.Mock(run=lambda *values: None)


def without_launches(launched: list[str]) -> None:
    """Lets the kernels of the library take tensors of any device, without a launch, whose names are appended."""
    kernels: dict[Any, _Unlaunched] = {}

    def run_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        launched.append(kernel.fn.__name__)
        if kernel.fn not in kernels:
            kernels[kernel.fn] = _Unlaunched(kernel)
        runtime._launch(kernels[kernel.fn], grid, 0, args, constants)

    torch._C._cuda_getCurrentRawStream = lambda device: 0
    for module in kernel_modules():
        for name, replacement in (("run_kernel", run_kernel), ("device_unsupported_reason", lambda x: None)):
            if hasattr(module, name):
                setattr(module, name, replacement)


def block_calls(model: str, batch_size: int) -> list[tuple[AttachedBlock, tuple[Any, ...], Any]]:
    """Returns the attached blocks of a network, the arguments of their calls, and the values of their bodies."""
    network = build_network(model, image_size=32 if "deit" in model else None)
    images = torch.randn(batch_size, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    calls: list[tuple[AttachedBlock, tuple[Any, ...], Any]] = []
    forward, run_body = AttachedBlock.forward, AttachedBlock._run_body
    arguments: list[tuple[Any, ...]] = []

    def record_call(block: AttachedBlock, *args: Any) -> Any:
        arguments.append(args)
        return forward(block, *args)

    def record_body(block: AttachedBlock, *args: Any) -> Any:
        values = run_body(block, *args)
        calls.append((block, arguments.pop(), values))
        return values

    with mock.patch.object(AttachedBlock, "forward", record_call), \
            mock.patch.object(AttachedBlock, "_run_body", record_body):  # fmt: skip
        network.to(memory_format=torch.channels_last).eval()(images)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--calls", type=int, default=1000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    launched: list[str] = []
    without_launches(launched)
    print(f"{'model':24} {'blocks':>6} {'us a block':>10} {'launches a block':>16}")
    for model in arguments.models:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            calls = block_calls(model, arguments.batch_size)
            seconds = []
            launched.clear()
            for block, args, values in calls:
                with mock.patch.object(AttachedBlock, "_run_body", lambda *_, values=values: values):
                    timer = timeit.Timer(lambda block=block, args=args: block(*args))
                    seconds.append(min(timer.repeat(5, arguments.calls // 5)) / (arguments.calls // 5))
        count = len(launched) / (5 * (arguments.calls // 5) * len(calls))
        print(f"{model:24} {len(calls):6} {statistics.mean(seconds) * 1e6:10.1f} {count:16.1f}", flush=True)


if __name__ == "__main__":
    main()
