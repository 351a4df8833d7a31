"""What autocast says of a tensor, also of one on "meta", a device that autocast does not know."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def autocast_type(x: Tensor) -> torch.dtype | None:
    """The type that autocast computes in on the device of `x`; None where it is off."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast off, on the device of `x`, inside the `with` block."""
    return nullcontext() if autocast_type(x) is None else torch.autocast(x.device.type, enabled=False)
