"""The input image of commands that plot a network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def photograph(model: nn.Module, path: Path | None = None) -> Tensor:
    """Loads an image file, or a sample photograph of matplotlib, with timm's transform for `model`: [1, 3, H, W]."""
    import timm
    from matplotlib import cbook

    from interlayer.training.data.images import open_rgb

    config: dict[str, Any] = timm.data.resolve_model_data_config(model)
    if path is not None and not path.is_file():
        raise ValueError(f"{path}: no such file")
    file: Any = path or cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
    tensor: Tensor = timm.data.create_transform(**config)(open_rgb(file))[None]
    return tensor
