"""Named models of the MRLA paper: backbones with layer attention, and peers that its tables compare with them.

Channels per head are those of section 5.1, stages and stochastic depth those of appendix B.1.1. ResNets drop only the
attention, with probability 0.2. EfficientNets and transformers use the stochastic depth of each block for the attention
as well (`drop_path_rate`): the same draw in the paper's reading, what the authors' programs do in the published one.
"""

from __future__ import annotations

from typing import Any

from ..networks import ceit  # noqa: F401  registers the CeiTs, which are backbones of models below
from .row import Row, register_rows

SIZES = ("tiny", "small", "base")
# The ablations of Table 4 of ResNet-50 + MRLA-light, as options of `interlayer.attach`; (f) is the mechanism "crla".
ABLATIONS: dict[str, dict[str, Any]] = {
    "b": {"memory": False},  # without lambda times the previous output
    "c": {"value_conv": False},  # without the depthwise convolution
    "d": {"projection": "linear"},  # fully connected q and k
    "e": {"learn_decay": False},  # lambda = 1
    "g": {"attention": False, "drop_path": 0.0},  # only the depthwise convolution and the norm (also Table 12 a)
}


def _rows() -> list[Row]:
    rows = []
    resnet = {"drop_path": 0.2, "channels_per_head": 32}
    shared = {"drop_path": "backbone"}
    for depth in (18, 34, 50, 101, 152):
        backbone = f"resnet{depth}"
        rows += [
            Row(f"{backbone}_mrla_light", backbone, "mrla_light", resnet),
            Row(
                f"{backbone}_mrla_base",
                backbone,
                "mrla_base",
                resnet,
                published_options={"channels_per_head": 16},
                published_backbone={"stem_type": "deep", "stem_width": 32},
            ),
        ]
    rows += [Row(f"resnet{depth}_{peer}", f"resnet{depth}", peer) for depth in (50, 101, 152) for peer in ("a2", "aa")]
    rows += [
        Row("resnet50_mla", "resnet50", "mla", resnet),
        Row("resnet50_mrla_linear", "resnet50", "mrla_linear", resnet),
    ]
    # The authors' programs draw anew at the rate of the block, and do not drop the attention of a DeiT.
    anew: dict[str, Any] = {"drop_path": "backbone_rate"}
    never: dict[str, Any] = {"drop_path": 0.0}
    others: list[tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        ("efficientnet_b0", "efficientnet_b0", {**shared, "channels_per_head": 8}, anew, {}),
        ("efficientnet_b1", "efficientnet_b1", {**shared, "channels_per_head": 8}, anew, {"input_size": (3, 240, 240)}),
        *(
            (f"deit_{size}", f"deit_{size}_patch16_224", {**shared, "channels_per_head": 16}, never, {})
            for size in SIZES
        ),
        *((f"ceit_{size}", f"ceit_{size}", {**shared, "channels_per_head": 16}, anew, {}) for size in SIZES[:2]),
        *((f"pvt_v2_{size}", f"pvt_v2_{size}", {**shared, "channels_per_head": 16}, {}, {}) for size in ("b0", "b1")),
    ]
    for family, backbone, options, published, config in others:
        rows += [
            Row(f"{family}_mrla_{kind}", backbone, f"mrla_{kind}", options, published_options=published, config=config)
            for kind in ("light", "base")
        ]
    return rows


register_rows(_rows())
