"""Interpolation of position embeddings for another image size, as timm does when it loads pretrained weights."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

logger = logging.getLogger(__name__)


def fit_positions(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Interpolates position embeddings and relative position biases that were trained at another image size.

    They are interpolated by the function with which timm loads pretrained weights of the model's family. Only tensors
    with a different shape, which is that of the model afterwards, are replaced. All others are returned unchanged.
    """
    own = model.state_dict()
    different = [name for name, tensor in tensors.items() if name in own and own[name].shape != tensor.shape]
    filter_fn = _filter_of(model) if different else None
    if filter_fn is None:
        return dict(tensors)
    try:
        filtered = filter_fn(dict(tensors), model)
    except Exception as error:  # written for weights of its own family; the caller reports other shapes
        logger.debug("%s could not be applied: %s", filter_fn, error)
        return dict(tensors)
    return {**tensors, **{n: filtered[n] for n in different if n in filtered and filtered[n].shape == own[n].shape}}


def _filter_of(model: nn.Module) -> Callable[[dict[str, Tensor], nn.Module], dict[str, Any]] | None:
    """Returns the `checkpoint_filter_fn` of the module that defines the class of the model, as in timm."""
    modules = (sys.modules.get(cls.__module__) for cls in type(model).__mro__)
    return next((found for module in modules if (found := getattr(module, "checkpoint_filter_fn", None))), None)
