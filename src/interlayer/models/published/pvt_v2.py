"""Names in the checkpoints of the authors of PVTv2, which are converted by timm."""

from __future__ import annotations

from timm.models import pvt_v2
from torch import Tensor, nn

from .family import Family, Tensors


def recognizes(tensors: Tensors, model: nn.Module) -> bool:
    return "patch_embed1.proj.weight" in tensors


def rename(tensors: Tensors, model: nn.Module) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = pvt_v2.checkpoint_filter_fn(dict(tensors), model)
    return renamed


PVT_V2 = Family("PVTv2", recognizes, rename)
