"""What a family of published checkpoints says of itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

Tensors = Mapping[str, Tensor]
Rule = tuple[str, str | Callable[[re.Match[str]], str]]


@dataclass(frozen=True)
class Family:
    """A family of checkpoints that share their names.

    Args:
        name: how messages call it.
        recognises: whether the names of a checkpoint are the family's; it is given the checkpoint and the model.
        rename: returns the tensors under the names of the model. A tensor that it does not know keeps its name.
        reading_matters: whether the checkpoint computes the published reading, so that a model built with the paper's
            reading is refused.
    """

    name: str
    recognises: Callable[[Tensors, nn.Module], bool]
    rename: Callable[[Tensors, nn.Module], dict[str, Tensor]]
    reading_matters: bool = False


def rename_by(rules: Iterable[Rule], tensors: Tensors) -> dict[str, Tensor]:
    """Renames tensors by regular expressions, which are applied to every name in order."""
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed
