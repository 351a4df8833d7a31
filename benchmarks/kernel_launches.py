"""Which kernels of the library are launched, for the benchmarks of this folder."""

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from interlayer.ops import _triton
from interlayer.ops._triton import runtime


def kernel_modules() -> list[ModuleType]:
    """Returns the files of kernels."""
    return [importlib.import_module(f"{_triton.__name__}.{m.name}") for m in pkgutil.iter_modules(_triton.__path__)]


def _name(kernel: Any) -> str:
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


def find_kernels() -> set[str]:
    """Returns the names of all kernels, each with that of its file."""
    return {
        _name(value)
        for module in kernel_modules()
        for name, value in vars(module).items()
        if name.endswith("_kernel") and hasattr(value, "fn")
    }


def record_launches() -> list[str]:
    """Returns a list to which the name of every kernel is appended when it is launched."""
    launched: list[str] = []
    original = runtime.run_kernel

    def run_kernel(kernel: Any, *args: Any, **constants: Any) -> None:
        launched.append(_name(kernel))
        original(kernel, *args, **constants)

    for module in kernel_modules():
        if hasattr(module, "run_kernel"):
            module.run_kernel = run_kernel  # type: ignore[attr-defined]
    return launched
