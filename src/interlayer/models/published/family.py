"""Description of a family of published checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

Tensors = Mapping[str, Tensor]
Rule = tuple[str, str | Callable[[re.Match[str]], str]]


@dataclass(frozen=True)
class Family:
    """A family of checkpoints with the same naming scheme.

    Args:
        name: name of the family.
        recognizes: function of the checkpoint and the model that returns whether the checkpoint belongs to the family.
        rename: function of the checkpoint and the model that returns the tensors by the names of the model. Unknown
            tensors keep their names.
        reading_matters: whether the checkpoint requires a model with the published reading.
    """

    name: str
    recognizes: Callable[[Tensors, nn.Module], bool]
    rename: Callable[[Tensors, nn.Module], dict[str, Tensor]]
    reading_matters: bool = False


def rename_by(rules: Iterable[Rule], tensors: Tensors) -> dict[str, Tensor]:
    """Renames tensors by regular expressions, which are applied to each name in order."""
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed
