"""Launching of kernels, their registration as torch operators, and the dtypes, tile sizes and limits they share."""

import inspect
import os
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, get_type_hints

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from triton import knobs

from ..dispatch import TRACED, is_chosen
from ..linked import new_stack
from ..once import once_differentiable

TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LOG2_E = tl.constexpr(1.4426950408889634)
SLOTS = tl.constexpr(64)  # copies of a gradient that all programs add to, to reduce contention of atomic additions
TOKEN_PROGRAMS = 8 if INTERPRETED else 1056  # programs that sum over tokens: eight for each multiprocessor of an H200
LEAST_ELEMENTS = 2**22  # of tokens: for fewer elements, torch's own kernels are faster to launch
LEAST_CHANNELS = 32  # of a tile: with 16, matrix products of Triton 3.6 read from a wrong address on Hopper


def number_types(dtype: torch.dtype) -> dict[str, tl.dtype]:
    """Returns the dtypes in which a kernel accumulates, ACC, and multiplies tiles, DOT.

    The interpreter does not support matrix products of bfloat16.
    """
    accumulate = TYPES[torch.promote_types(dtype, torch.float32)]
    return {"ACC": accumulate, "DOT": accumulate if INTERPRETED else TYPES[dtype]}


@triton.jit
def product(a, b, ACC: tl.constexpr, DOT: tl.constexpr):
    """Multiplies two tiles in the dtype DOT and accumulate in ACC."""
    return tl.dot(a.to(DOT), b.to(DOT), input_precision="ieee", out_dtype=ACC)


@dataclass(frozen=True)
class Launch:
    """The launch parameters of an attention kernel.

    Args:
        queries: The maximum number of queries of a program.
        keys: The maximum number of keys loaded at once.
        warps: Triton's num_warps.
        stages: Triton's num_stages.
    """

    queries: int
    keys: int
    warps: int
    stages: int


# In decreasing order of shared memory: the first one that fits the GPU is used.
LAUNCHES = (Launch(64, 64, 4, 2), Launch(64, 32, 4, 2), Launch(32, 32, 4, 1), Launch(16, 16, 4, 1))
PLAIN = {Tensor, torch.nn.Parameter, int, float, bool, type(None)}  # types without a __torch_dispatch__
_FITTING: dict[Hashable, int] = {}  # the index of the launch that fits, by kernel and constants
_COMPILED: dict[Hashable, tuple[Any, ...]] = {}  # compiled kernels, see `run_kernel`


def run_attention(
    kernel: Any,
    args: tuple[Any, ...],
    constants: dict[str, Any],
    tiles: Callable[[Launch], tuple[tuple[int, ...], dict[str, int]]],
    launches: tuple[Launch, ...] = LAUNCHES,
) -> None:
    """Runs an attention kernel with the first launch parameters that fit the GPU, which are remembered.

    Args:
        kernel: The kernel.
        args: Its tensors, the queries first, and its numbers.
        constants: Its constants, except for the dtypes and the sizes of tiles.
        tiles: A function that returns the grid and the sizes of tiles for given launch parameters.
        launches: The launch parameters, in the order in which they are tried.
    """
    q = args[0]
    key = (kernel.fn.__name__, q.dtype, q.device, *constants.values())
    for number in range(_FITTING.get(key, 0), len(launches)):
        launch = launches[number]
        grid, sizes = tiles(launch)
        try:
            run_kernel(
                kernel, grid, *args, **constants, **number_types(q.dtype), **sizes,
                num_warps=launch.warps, num_stages=launch.stages,
            )  # fmt: skip
        except triton.OutOfResources:
            if number == len(launches) - 1:
                raise
        else:
            _FITTING[key] = number
            return


class Operator:
    """An operator registered with torch, which torch.compile and FLOP counters see as a single operator.

    If operators are not traced, the function is called directly, because torch's dispatch to an operator written in
    Python takes longer than a small kernel. Used as a decorator: ``@partial(Operator, name)``.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.registered = torch.library.custom_op(f"interlayer::{name}", mutates_args=())(function)
        self.register_fake = self.registered.register_fake
        self._direct = function

    def register_autograd(self, differentiate: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Registers a backward pass that is not differentiable, like :func:`torch.library.register_autograd`."""
        backward, function = once_differentiable(differentiate), self._direct
        self.registered.register_autograd(backward, setup_context=setup_context)

        def forward(ctx: Any, *args: Any) -> Any:
            output = function(*args)
            setup_context(ctx, args, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._direct = type(self.name, (torch.autograd.Function,), methods).apply  # type: ignore[attr-defined]

    def __call__(self, *args: Any) -> Any:
        return self.registered(*args) if is_traced(*args) else self._direct(*args)


Tensors = tuple[Tensor | None, ...]
SCHEMA_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", list[Tensor]: "Tensor[]", int: "SymInt", float: "float", bool: "bool"
}  # fmt: skip


class DifferentiableOperator:
    """An operator made of two functions on tensors and numbers, its forward and its backward pass.

    It has two forms. Eager code calls both functions directly, through a :class:`torch.autograd.Function`. For
    torch.compile they are registered with torch as ``interlayer::<name>`` and ``interlayer::<name>_backward``, which
    it takes as they are. Registered operators may neither change nor return their arguments. A function that updates
    statistics in place must therefore return them instead if it is called by `traced`, and the caller updates them.

    Args:
        name: The name of the operator.
        forward: A function of tensors, then of lists of tensors, which get no gradient, then of numbers, then of a
            bool: whether there may be a backward pass. It returns a tuple: the outputs, and after them what the
            backward pass needs in addition. None stands for a tensor that is missing.
        backward: A function of the arguments of `forward` except for the last one, of its results, and of the
            gradients of its outputs. It returns the gradient of each tensor among the arguments, or None.
        fake: A function like `forward` that returns tensors of the same shapes, dtypes and strides without values. The
            sizes may be symbols.
        outputs: The number of outputs.
        results: The number of results of `forward`.
        keep: A function of the arguments of `forward` except for the last one, and of its results. It returns the
            results for the backward pass, with None for those that it does not need. Default: all are kept.
        constant: The names of tensors for which `backward` returns no gradient.
        unread: The names of tensors whose values `backward` does not need, so that they are not saved. It gets None
            or, for a tensor with a gradient, another one of the same shape and dtype. If the name of a tensor is given,
            which must have the same strides, it gets that one; if that is missing, the tensor itself is saved. If the
            number of an output is given, it gets the gradient of the output, in any layout, or zeros if there is none;
            the tensor may then not be None.
        links: The names of tensors that only carry a gradient, each with the name of the list of tensors for which it
            does so (see `linked.py`). A link is missing if the list is empty.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Tensors],
        backward: Callable[[tuple[Any, ...], Tensors, Tensors], Tensors],
        fake: Callable[..., Tensors],
        *,
        outputs: int,
        results: int,
        keep: Callable[[tuple[Any, ...], Tensors], Tensors] = lambda args, results: results,
        constant: Collection[str] = (),
        unread: Mapping[str, str | int | None] = MappingProxyType({}),
        links: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._forward = forward
        types = get_type_hints(forward)
        parameters = {n: SCHEMA_TYPES[types[n]] for n in inspect.signature(forward).parameters}
        tensors = [n for n, kind in parameters.items() if kind in ("Tensor", "Tensor?")]
        lists = [n for n, kind in parameters.items() if kind == "Tensor[]"]
        count, first_number = len(tensors), len(tensors) + len(lists)
        first_list = count + results + outputs  # among the arguments of the registered backward pass
        linked = {tensors.index(n): lists.index(other) for n, other in links.items()}
        unread = {**unread, **dict.fromkeys(links)}
        differentiable = [i for i, n in enumerate(tensors) if n not in constant]
        by_gradient = {tensors.index(n): other for n, other in unread.items() if isinstance(other, int)}
        replaced = [
            (tensors.index(n), tensors.index(other) if isinstance(other, str) else None) for n, other in unread.items()
        ]

        def save(ctx: Any, args: tuple[Any, ...], found: Tensors) -> None:
            read = list(args[:count])
            for i, other in replaced:
                if other is None:
                    read[i] = None
                elif args[i] is not None and args[other] is not None:
                    read[i] = args[other]
            given = args[count:first_number]
            ctx.save_for_backward(*read, *keep(args, found), *(tensor for tensors in given for tensor in tensors))
            ctx.unsaved = [(args[i].shape, args[i].dtype, args[i].device) for i in by_gradient]
            ctx.lengths = [len(tensors) for tensors in given]
            ctx.numbers = args[first_number:]
            ctx.set_materialize_grads(False)

        def restore(ctx: Any, grads: Tensors) -> tuple[Tensors, Tensors, list[list[Tensor]]]:
            """Returns the tensors, results and lists of tensors that were saved."""
            saved = ctx.saved_tensors  # gradient checkpointing allows only one access
            read = list(saved[:count])
            for (i, output), (shape, dtype, device) in zip(by_gradient.items(), ctx.unsaved, strict=True):
                grad = grads[output]
                read[i] = torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            rest = iter(saved[count + results :])
            return tuple(read), saved[count : count + results], [list(islice(rest, n)) for n in ctx.lengths]

        class Direct(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                found = forward(*args, any(ctx.needs_input_grad))
                save(ctx, args, found)
                return found[:outputs]

            @staticmethod
            @once_differentiable
            def backward(ctx: Any, *grads: Any) -> Any:
                read, kept, given = restore(ctx, grads)
                found = backward((*read, *given, *ctx.numbers), kept, grads)
                return *found, *(None,) * (len(given) + len(ctx.numbers))

        def run(*args: Any) -> tuple[Tensor, ...]:
            return _separate(_present(forward(*args), args[0]), args)

        def run_backward(*args: Any) -> tuple[Tensor, ...]:
            given = [None if t is not None and t.shape == (0,) else t for t in args[:first_list]]
            grads = given[count + results :]
            found = backward((*given[:count], *args[len(given) :]), tuple(given[count : count + results]), tuple(grads))
            strided = tuple(
                found[i] if i in linked else None if args[i] is None else _with_strides(found[i], args[i])
                for i in differentiable
            )
            return _separate(_present(strided, args[0]), args)

        def fake_gradient(i: int, args: tuple[Any, ...]) -> Tensor | None:
            if i in linked:
                tensors = args[first_list + linked[i]]
                return new_stack(tensors) if tensors else None
            return None if args[i] is None else torch.empty_like(args[i])

        def fake_backward(*args: Any) -> tuple[Tensor, ...]:
            return _present(tuple(fake_gradient(i, args) for i in differentiable), args[0])

        saved_types = {
            f"{kind}_{i}": "Tensor?" for kind, n in (("result", results), ("grad", outputs)) for i in range(n)
        }
        others = dict(list(parameters.items())[count:-1])  # lists and numbers
        self.registered = _register(name, parameters, results, run)
        self.registered.register_fake(lambda *args: _present(fake(*args), args[0]))
        registered_backward = _register(
            f"{name}_backward",
            {n: parameters[n] for n in tensors} | saved_types | others,
            len(differentiable),
            run_backward,
        )
        registered_backward.register_fake(fake_backward)

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            save(ctx, inputs[:-1], output)
            ctx.mark_non_differentiable(*output[outputs:])

        def differentiate(ctx: Any, *grads: Any) -> Any:
            read, kept, given = restore(ctx, grads)
            every: list[Tensor | None] = [None] * count
            found = registered_backward(*read, *kept, *grads[:outputs], *given, *ctx.numbers)
            for i, grad in zip(differentiable, found, strict=True):
                is_missing = not given[linked[i]] if i in linked else read[i] is None
                every[i] = None if is_missing else grad
            return *every, *([None] * n for n in ctx.lengths), *(None,) * (len(ctx.numbers) + 1)

        self.registered.register_autograd(once_differentiable(differentiate), setup_context=setup_context)
        self._direct = Direct.apply
        self._outputs = outputs

    def __call__(self, *args: Any) -> Any:
        """Runs `forward` at once and returns its outputs. `args` does not contain the last argument of `forward`."""
        if torch.is_grad_enabled():
            return self._direct(*args)
        return self._forward(*args, False)[: self._outputs]  # autograd takes longer than a small kernel

    def traced(self, *args: Any) -> tuple[Tensor, ...]:
        """Calls the registered operator and returns all results. An empty tensor stands for one that is missing."""
        return self.registered(*args, torch.is_grad_enabled())  # type: ignore[no-any-return]


def _register(name: str, parameters: dict[str, str], results: int, function: Callable[..., Any]) -> Any:
    """Registers a function that returns several tensors as an operator."""
    arguments = ", ".join(f"{kind} {parameter}" for parameter, kind in parameters.items())
    schema = f"({arguments}) -> ({', '.join(['Tensor'] * results)})"
    return torch.library.custom_op(f"interlayer::{name}", function, mutates_args=(), schema=schema)


def _present(tensors: Tensors, x: Tensor) -> tuple[Tensor, ...]:
    """Replaces None, which an operator cannot return, by an empty tensor."""
    return tuple(x.new_empty(0) if t is None else t for t in tensors)


def _with_strides(grad: Tensor | None, x: Tensor) -> Tensor:
    """Returns the gradient of x with the strides of x, which torch.compile was told."""
    if grad is None:
        return torch.zeros_like(x)
    sizes = zip(x.shape, x.stride(), grad.stride(), strict=True)
    if all(size == 1 or stride == other for size, stride, other in sizes):
        return grad
    return torch.empty_like(x).copy_(grad)


def _separate(tensors: tuple[Tensor, ...], args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Copies tensors that share memory with an argument or an earlier tensor, which an operator cannot return.

    Those that do not start where their memory starts are copied too: torch.compile was told that they do.
    """
    flat = chain.from_iterable(arg if isinstance(arg, list) else (arg,) for arg in args)
    known = {t.untyped_storage().data_ptr() for t in flat if isinstance(t, Tensor)}
    separate = []
    for tensor in tensors:
        place = tensor.untyped_storage().data_ptr()
        if tensor.storage_offset() or (place in known and place):
            separate.append(tensor.clone())
        else:
            separate.append(tensor)
            known.add(place)
    return tuple(separate)


def is_compiled() -> bool:
    """Returns whether torch.compile traces the operators called here, and neither torch.export nor a transform does."""
    return (
        is_dynamo_compiling()
        and not torch.compiler._is_exporting_flag  # Dynamo of torch 2.11 takes is_exporting() for True
        and not torch._C._are_functorch_transforms_active()
    )


def is_traced_otherwise(*args: Any) -> bool:
    """Returns whether a tracer, mode or transform other than torch.compile sees operators on these arguments."""
    if is_dynamo_compiling() and is_compiled():
        return args[0].is_meta or not all(type(x) in PLAIN for x in args)
    return is_traced(*args)


def is_traced(*args: Any) -> bool:
    """Returns whether a compiler, a tracer, a torch_dispatch mode or a transform sees operators on these arguments."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or not PLAIN.issuperset(map(type, args))
        or args[0].is_meta
        or torch._C._functorch.is_legacy_batchedtensor(args[0])  # a gradient of grad(is_grads_batched=True)
    )


def tokens_unsupported_reason(x: Tensor, *others: Any) -> str | None:
    """Returns why a kernel that is not a registered operator does not support these arguments, or None if it does."""
    if is_traced(x, *others):  # checked before any size is read, which would add a guard to the graph
        return TRACED
    if not x.numel():
        return "there are no tokens"
    if not x.is_contiguous():
        return "tokens must lie one after another"
    if x.dtype not in TYPES:
        return f"tokens must be of a floating-point type, got {x.dtype}"
    return device_unsupported_reason(x)


def is_channels_last(x: Tensor) -> bool:
    """Returns whether the pixels of a map, [B, C, H, W], lie one after another in memory, with all their channels."""
    if not torch.compiler.is_compiling():
        return x.is_contiguous(memory_format=torch.channels_last)
    if x.dim() != 4:  # torch 2.11 does not know for a symbolic batch size, so that the strides are compared
        return False
    _, channels, height, width = x.shape
    strides = (height * width * channels, 1, width * channels, channels)
    return all(size == 1 or stride == dense for size, stride, dense in zip(x.shape, x.stride(), strides, strict=True))


def small_unsupported_reason(x: Tensor) -> str | None:
    """Returns why a kernel that is only faster for large tensors is not used, or None if it is."""
    if x.numel() < LEAST_ELEMENTS and not is_chosen("triton"):
        return f"for less than {LEAST_ELEMENTS} elements torch's own kernels are as fast"
    return None


def device_unsupported_reason(x: Tensor) -> str | None:
    """Returns why Triton does not support the device or dtype of a tensor, or None if it does."""
    by_name = is_chosen("triton") and (INTERPRETED or x.is_meta)  # the interpreter is slow: never under "auto"
    if x.device.type != "cuda" and not by_name:
        return f"Triton needs a GPU, got a tensor on {x.device.type}"
    if x.dtype.itemsize == 8 and not INTERPRETED:
        return "float64 is computed by the reference"
    return None


def tile(number: int, most: int | None = None) -> int:
    """Returns the smallest power of two that is at least `number` and 16, but at most `most`.

    Matrix products need tiles of at least 16.
    """
    size = max(16, power_of_2(number))
    return size if most is None else min(size, most)


def head_tile(channels: int) -> int:
    """Returns the size of a tile for the channels of one head."""
    return tile(max(LEAST_CHANNELS, channels))


# Triton's own versions can also be called in kernels, which makes them slow to call from Python.
def power_of_2(number: int) -> int:
    """Returns the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def pieces(number: int, size: int) -> int:
    """Returns `number` divided by `size`, rounded up."""
    return -(-number // size)


def run_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launches a kernel on the GPU of its first argument, a tensor.

    Triton's own launch takes longer than a small kernel: it examines every argument again. What it compiled is
    therefore remembered by the properties of the arguments for which it compiles anew, and launched directly.

    Args:
        kernel: The kernel, whose constants come last in its signature.
        grid: The number of programs along each axis.
        args: Its tensors, tuples of tensors and numbers, in the order of its signature.
        constants: Its constants and Triton's options, such as `num_warps`.
    """
    device = args[0].device
    if device.type != "cuda":
        kernel[grid](*args, **constants)
    elif device.index == torch._C._cuda_getDevice():
        _launch(kernel, grid, device.index, args, constants)
    else:
        with torch.cuda.device(device):
            _launch(kernel, grid, device.index, args, constants)


def _launch(kernel: Any, grid: tuple[int, ...], device: int, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    key: list[Any] = [kernel.fn, device, *constants, *constants.values()]
    values: list[Any] = []
    addresses = 0
    for value in args:
        kind = type(value)
        if kind is int:  # Triton compiles anew for 1, for multiples of 16 and for 64 bits
            values.append(value)
            key.append(-1 if value == 1 else (value % 16 == 0) + 2 * (-(2**31) <= value < 2**31))
        elif isinstance(value, Tensor):
            address = value.data_ptr()
            addresses |= address
            values.append(address)
            key.append(value.dtype)
        elif kind is tuple:
            pointers = tuple(tensor.data_ptr() for tensor in value)
            for address in pointers:
                addresses |= address
            values.append(pointers)
            key.append(tuple(tensor.dtype for tensor in value))
        else:
            values.append(value)
            key.append(kind)
    found = None if addresses % 16 or _has_hooks() else _COMPILED.get(tuple(key))
    if found is None:
        compiled = kernel[grid](*args, **constants)
        if addresses % 16 == 0 and not INTERPRETED:
            ordered = tuple(constants[name] for name in kernel.arg_names[len(args) :])
            _COMPILED[tuple(key)] = compiled.run, compiled.function, compiled.packed_metadata, ordered
        return
    run, function, metadata, ordered = found
    stream = torch._C._cuda_getCurrentRawStream(device)
    x, y, z = (*grid, 1, 1)[:3]
    run(x, y, z, stream, function, metadata, None, None, None, *values, *ordered)


def _has_hooks() -> bool:
    """Returns whether a profiler wants to be told of launches, which only Triton's own launch does."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)
