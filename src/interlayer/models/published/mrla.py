"""Names in the published MRLA checkpoints: ResNet, EfficientNet, DeiT, CeiT and PVTv2 with layer attention.

The names of the backbone are mostly those of timm. The names of the attention differ.
"""

from __future__ import annotations

import re

from torch import Tensor, nn

from .family import Family, Rule, Tensors, rename_by

RULES: tuple[Rule, ...] = (
    (r"\.mrla\.lambda_t$", ".mrla.decay"),
    (r"\.mrla\.mrla\.Wq\.", ".mrla.query."),
    (r"\.mrla\.mrla\.Wk\.", ".mrla.key."),
    (r"\.mrla\.mrla\.Wv\.", ".mrla.value."),
    (r"\.bn_mrla\.", ".mrla.norm."),
    (r"\.mrla\.normx\.", ".mrla.norm_in."),
    (r"\.mrla\.normo\.", ".mrla.norm_previous."),
)


def recognizes(tensors: Tensors, model: nn.Module) -> bool:
    return any(re.search(pattern, name) for name in tensors for pattern, _ in RULES)


def rename(tensors: Tensors, model: nn.Module) -> dict[str, Tensor]:
    return rename_by(RULES, tensors)


MRLA = Family("MRLA", recognizes, rename, reading_matters=True)
