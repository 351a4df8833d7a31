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

    config: dict[str, Any] = timm.data.resolve_model_data_config(model)
    file: Any = path or Path(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False))
    return transformed(file, timm.data.create_transform(**config))


def transformed(path: Path, transform: Any) -> Tensor:
    """Loads an image file and transforms it to a batch of one image, [1, 3, H, W]."""
    import torch

    from interlayer.training.data.images import open_rgb, unreadable

    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        image = open_rgb(path)
    except Exception as error:  # Pillow raises exceptions of many types for files that are not images
        raise ValueError(f"{path} cannot be used: {unreadable(error)}; give the file of a photograph") from error
    return torch.as_tensor(transform(image))[None]
