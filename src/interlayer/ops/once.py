"""Gradients that cannot be differentiated again say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of an autograd function's `backward` that has no gradient of its own: asking for one is an error.

    torch's decorator of that name hangs the error on copies, which `torch.autograd.grad` never visits: second
    derivatives would be zero there.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of interlayer's fast implementations cannot be differentiated again: run the forward pass "
                "under interlayer.backend('reference')"
            )
        return backward(ctx, *grads)

    return checked
