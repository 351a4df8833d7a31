"""Fused kernels, one file an operation. They run on a GPU, or anywhere under TRITON_INTERPRET=1."""

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import WATCHED, asked_for
from ..once import once_differentiable

TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LOG2_E = tl.constexpr(1.4426950408889634)
SLOTS = tl.constexpr(64)  # copies of gradients that all programs add to, so that they seldom meet at one place
LEAST_CHANNELS = 32  # of a tile: Triton 3.6 reads those of 16 from a wrong address in Hopper's products


def number_types(dtype: torch.dtype) -> dict[str, tl.dtype]:
    """In which a kernel adds up, ACC, and multiplies tiles, DOT: the interpreter knows no products of bfloat16."""
    accumulate = TYPES[torch.promote_types(dtype, torch.float32)]
    return {"ACC": accumulate, "DOT": accumulate if INTERPRETED else TYPES[dtype]}


@triton.jit
def product(a, b, ACC: tl.constexpr, DOT: tl.constexpr):
    """A product of tiles whose elements are of the type DOT, added up in ACC."""
    return tl.dot(a.to(DOT), b.to(DOT), input_precision="ieee", out_dtype=ACC)


@dataclass(frozen=True)
class Launch:
    """How a kernel of attention is cut up: queries of a program at most, keys at once, warps, loads ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


# From large to small: where a GPU has too little shared memory for one, the next is taken.
LAUNCHES = (Launch(64, 64, 4, 2), Launch(64, 32, 4, 2), Launch(32, 32, 4, 1), Launch(16, 16, 4, 1))
PLAIN = {Tensor, torch.nn.Parameter, int, float, bool, type(None)}  # arguments that nobody else has to see
_FITTING: dict[Hashable, int] = {}  # which launch fitted, by kernel and constants


def run_fitting(key: Hashable, launches: tuple[Launch, ...], run: Callable[[Launch], None]) -> None:
    """Run a kernel, cut up in the first way that fits the GPU; which one, is remembered for the `key`."""
    for number in range(_FITTING.get(key, 0), len(launches)):
        try:
            run(launches[number])
        except triton.OutOfResources:
            if number == len(launches) - 1:
                raise
        else:
            _FITTING[key] = number
            return


class Operator:
    """An operator of torch's, so that torch.compile and counters of FLOPs take it as one.

    Where nothing looks on, its function is called directly: torch's way to an operator written in Python takes longer
    than a small kernel runs. Use as a decorator, with the operator's name.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.registered = torch.library.custom_op(f"interlayer::{name}", mutates_args=())(function)
        self.register_fake = self.registered.register_fake
        self._direct = function

    def register_autograd(self, differentiate: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """As torch.library's, of an operator whose gradient cannot be differentiated again."""
        backward, function = once_differentiable(differentiate), self._direct
        self.registered.register_autograd(backward, setup_context=setup_context)

        def forward(ctx: Any, *args: Any) -> Any:
            output = function(*args)
            setup_context(ctx, args, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._direct = type(self.name, (torch.autograd.Function,), methods).apply  # type: ignore[attr-defined]

    def __call__(self, *args: Any) -> Any:
        return self.registered(*args) if watched(*args) else self._direct(*args)


def watched(*args: Any) -> bool:
    """Whether the compiler, a tracer, a mode or a transform wants to see the operators called on these tensors."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or not all(type(x) in PLAIN for x in args)
        or args[0].is_meta
        or torch._C._functorch.is_legacy_batchedtensor(args[0])  # a gradient of grad(is_grads_batched=True)
    )


def why_not_these(x: Tensor, *others: Any) -> str | None:
    """Why a kernel that is no operator of torch's cannot take tokens x and what goes with them, or None."""
    if watched(x, *others):  # before any look at sizes, which would become part of a graph
        return WATCHED
    if not x.numel():
        return "there are no tokens"
    if not x.is_contiguous():
        return "tokens must lie one after another"
    if x.dtype not in TYPES:
        return f"tokens must be of a floating-point type, got {x.dtype}"
    return why_not_here(x)


def why_not_here(x: Tensor) -> str | None:
    """Why Triton cannot run on this tensor, or None."""
    by_name = asked_for("triton") and (INTERPRETED or x.is_meta)  # the interpreter is slow: never by itself
    if x.device.type != "cuda" and not by_name:
        return f"Triton needs a GPU, got a tensor on {x.device.type}"
    if x.dtype.itemsize == 8 and not INTERPRETED:
        return "float64 is computed by the reference"
    return None


def tile(number: int, most: int | None = None) -> int:
    """The power of two that holds `number`: at least the 16 that a product of tiles takes, at most `most`."""
    size = max(16, power_of_2(number))
    return size if most is None else min(size, most)


# Triton's own are functions of its language too, which makes calls from Python slow.
def power_of_2(number: int) -> int:
    """The smallest that is at least `number`."""
    return 1 << (number - 1).bit_length()


def pieces(number: int, size: int) -> int:
    """How many of a size it takes to hold `number`."""
    return -(-number // size)


def run_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Start a kernel on the GPU of its first tensor."""
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, **constants)
