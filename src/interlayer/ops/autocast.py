"""The state of autocast on the device of a tensor, also on the "meta" device, which autocast does not support."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def autocast_type(x: Tensor) -> torch.dtype | None:
    """Returns the autocast dtype of the device of `x`, or None if autocast is disabled."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Returns a context manager that disables autocast on the device of `x`."""
    return nullcontext() if autocast_type(x) is None else torch.autocast(x.device.type, enabled=False)
