"""Capture of what modules receive and return while a network runs.

`hooked` is the only place of the analysis where hooks are added to a network, and where they are removed. `capture`
keeps the values of named modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..hosts.carried import release

# Called before a module with (module, args, kwargs). Returns None, or the (args, kwargs) that the module gets instead.
Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
# Called after a module with (module, args, kwargs, output). Returns None, or the output that the network gets instead.
After = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


@contextmanager
def hooked(
    model: nn.Module,
    *,
    before: Mapping[nn.Module, Before] | None = None,
    after: Mapping[nn.Module, After] | None = None,
) -> Iterator[None]:
    """Calls functions before and after modules of a network inside the `with` block.

    The hooks are removed when the block is left, also by an error. A compiled network runs eagerly inside, because
    compiled code does not call new hooks.

    Args:
        model: the network that runs.
        before: for each module, the function to call with (module, args, kwargs) before it runs.
        after: for each module, the function to call with (module, args, kwargs, output) when it has run.
    """
    with ExitStack() as stack:
        stack.enter_context(eagerly(model))
        for module, enter in (before or {}).items():
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        for module, leave in (after or {}).items():
            stack.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        yield


@contextmanager
def capture(
    model: nn.Module,
    modules: Iterable[str] | Mapping[str, nn.Module],
    *,
    of: Literal["output", "input"] = "output",
    detach: bool = True,
    reduce: Callable[[Any], Any] | None = None,
) -> Iterator[dict[str, list[Any]]]:
    """Collects what modules return, or receive, during forward passes inside the `with` block.

    Yields a dict that maps the name of each module that has been called to a list with one value for each call. What
    an attached block carries beside its output is left out.

    Captured tensors keep their values, although networks overwrite some of them in place: a detached tensor is a copy,
    and if tensors are not detached, the network continues with a copy. The captured tensor is then part of the graph,
    so `torch.autograd.grad(score, captured["blocks.3"][0])` is the gradient with respect to it.

    Args:
        model: the network that runs. A compiled network runs eagerly inside the block.
        modules: names of modules as in `model.named_modules()`, or the modules by the names to use.
        of: "output", or "input" for the first argument.
        detach: whether tensors are detached from the graph.
        reduce: a function of a value whose result is kept instead of it, for example the mean over images.

    Raises:
        ValueError: the network has no module of that name.

    >>> with capture(model, ["layer4"]) as captured:
    ...     model(images)
    >>> captured["layer4"][0].shape
    """
    if of not in ("output", "input"):
        raise ValueError(f"of must be 'output' or 'input', got {of!r}")
    found = modules if isinstance(modules, Mapping) else {name: _module(model, name) for name in modules}
    names: dict[nn.Module, list[str]] = {}
    for name, module in found.items():
        names.setdefault(module, []).append(name)
    captured: dict[str, list[Any]] = {}

    def keep(module: nn.Module, value: Any) -> Any:
        """Keeps a value, and returns the one with which the network continues."""
        kept = tree_map(_detached, release(value)) if detach else release(value)
        if reduce is not None:
            kept = reduce(kept)
        elif detach:
            kept = tree_map(_copied, kept)
        for name in names[module]:
            captured.setdefault(name, []).append(kept)
        return value if detach else tree_map(_copied, value)

    def keep_input(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args or not kwargs:
            return tuple(keep(module, value) for value in args[:1]) + args[1:], kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: keep(module, kwargs[first])}

    def keep_output(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return keep(module, output)

    inputs = dict.fromkeys(names, keep_input) if of == "input" else {}
    outputs = dict.fromkeys(names, keep_output) if of == "output" else {}
    with hooked(model, before=inputs, after=outputs):
        yield captured


def eagerly(model: nn.Module) -> AbstractContextManager[Any]:
    """Returns a context in which a compiled network runs eagerly: compiled code does not call new hooks."""
    compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        names = ", ".join([name for name, _ in model.named_children()][:12])
        raise ValueError(
            f"{type(model).__name__} has no module {name!r}: expected a name of model.named_modules(), such as {names}"
        ) from error


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
