"""Gradients that a backward pass may overwrite, because it allocated them itself and nobody else holds them.

A chain of functions that passes tensors on returns their gradients from one backward pass to the next. Each of these
can add its part in place, unless a hook, `torch.autograd.grad` or the caller of `backward()` keeps a reference to the
gradient. Autograd does not say so, but the numbers of references to the tensor and to its storage do: they are compared
with those that a gradient has which nobody else holds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..once import once_differentiable


def new_gradient(like: Tensor) -> Tensor:
    """Returns an empty tensor for a gradient, which a later function of the backward pass may overwrite."""
    grad = torch.empty_like(like)
    grad._interlayer_own = True  # type: ignore[attr-defined]  # the attribute stays with the tensor in the engine
    return grad


def may_overwrite(grads: Sequence[Tensor | None], device: torch.device) -> list[bool]:
    """Returns which of the gradients that a backward pass received it may overwrite.

    It must be called first, with the tuple of gradients as received by a function under `once_differentiable`: every
    variable that holds a gradient counts. `references_of_own` must have been called in the forward pass.
    """
    expected = references_of_own(device)
    return [
        grad is not None and hasattr(grad, "_interlayer_own") and found == expected
        for grad, found in zip(grads, _references(grads), strict=True)
    ]


def _references(grads: Sequence[Tensor | None]) -> list[tuple[int, ...] | None]:
    count = torch._C._storage_Use_Count  # type: ignore[attr-defined]
    found: list[tuple[int, ...] | None] = []
    for grad in grads:
        if grad is None:
            found.append(None)
        else:
            found.append((sys.getrefcount(grad), grad._use_count(), count(grad.untyped_storage()._cdata)))  # type: ignore[attr-defined]
    return found


@cache
def references_of_own(device: torch.device) -> tuple[int, ...]:
    """Returns the numbers of references to a gradient that nobody else holds, which differ between versions of torch.

    The first call for a device runs a backward pass there.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, device=device, requires_grad=True)
        _Probe.apply(_Probe.apply(x)).backward()
    return _Probe.found


class _Probe(torch.autograd.Function):
    found: tuple[int, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + 1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        _Probe.found = _references(grads)[0] or ()
        return torch.zeros_like(grads[0])
