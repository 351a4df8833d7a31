"""Error for second derivatives of gradients that cannot be differentiated."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for the `backward` of an autograd function that is not differentiable.

    torch's decorator of the same name attaches the error to copies of the gradients, which `torch.autograd.grad` never
    visits, so that second derivatives would silently be zero.
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
