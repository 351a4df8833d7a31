"""Named models of the RLA paper, "Recurrence along Depth", and the models that its tables compare with them.

The state has 32 channels on ImageNet, and 12 (bottlenecks and Xception) or 4 (blocks of two 3x3 convolutions) on CIFAR,
as in appendix B.1 and B.2. Variants are named as in Tables 6 and 11.
"""

from __future__ import annotations

from typing import Any

from ...mechanisms.gates import ON_BRANCH
from ..networks import preresnet, xception  # noqa: F401  registers the backbones of models below
from .row import Row, register_rows

VARIANTS = ("v2", "v3", "v4", "v5", "v6", "postact", "convlstm", "convgru", "unshared", "no_exchange")

# The authors' MobileNetV2 has ECA of kernel size 1 in the narrow blocks and 3 in the others.
PUBLISHED_ECA = {"kernel_size": {16: 1, 24: 1, 32: 1, 64: 1, 96: 3, 160: 3, 320: 3}}


def _with(attention: str) -> dict[str, Any]:
    return {"block_args": {"attn_layer": ON_BRANCH[attention]}}


def _imagenet_rows() -> list[Row]:
    rows = []
    for depth in (50, 101, 152):
        backbone = f"resnet{depth}"
        rows.append(Row(f"{backbone}_rla", backbone, "rla"))
        for attention in ("se", "eca"):
            rows.append(Row(f"{backbone}_{attention}_rla", backbone, "rla", backbone_options=_with(attention)))
        for attention in ("se", "eca", "cbam", "gc"):
            rows.append(Row(f"{backbone}_{attention}", backbone, "", backbone_options=_with(attention)))
        rows += [Row(f"{backbone}_{interaction}", backbone, interaction) for interaction in ("nl", "dia", "bridge")]
    rows += [Row(f"resnet50_rla_{variant}", "resnet50", "rla", {"variant": variant}) for variant in VARIANTS]
    rows += [
        Row("resnet101_rla_unshared", "resnet101", "rla", {"variant": "unshared"}),
        Row("resnet50_wide32", "resnet50", "", backbone_options={"channels": (72, 136, 264, 520)}),
        Row("resnet50d_rla", "resnet50d", "rla"),
        Row("resnet50d_eca_rla", "resnet50d", "rla", backbone_options=_with("eca")),
        Row("resnext50_32x4d_rla", "resnext50_32x4d", "rla"),
        Row("mobilenetv2_rla", "mobilenetv2_100", "rla"),
        Row("mobilenetv2_eca_rla", "mobilenetv2_100", "rla", companion="eca", published_companion=PUBLISHED_ECA),
        Row("mobilenetv2_eca", "mobilenetv2_100", "eca", published_options=PUBLISHED_ECA),
        Row("mobilenetv2_se", "mobilenetv2_100", "se"),
    ]
    return rows


def _cifar_rows() -> list[Row]:
    deep = "preresnet164_cifar"
    rows = [
        Row(f"preresnet{depth}_cifar_rla", f"preresnet{depth}_cifar", "rla", {"state_channels": channels})
        for depth, channels in ((20, 4), (56, 4), (110, 4), (164, 12))
    ]
    for variant in VARIANTS:
        options: dict[str, Any] = {"state_channels": 12, "variant": variant}
        if variant in ("convlstm", "convgru"):
            options["cell_norm"] = False
        rows.append(Row(f"{deep}_rla_{variant}", deep, "rla", options))
    rows += [Row(f"{deep}_rla_k{k}", deep, "rla", {"state_channels": k}) for k in (8, 16, 24)]
    rows.append(Row("xception_cifar_rla", "xception_cifar", "rla", {"state_channels": 12}))
    return rows


register_rows([*_imagenet_rows(), *_cifar_rows()])
