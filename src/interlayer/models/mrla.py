"""The named models of the MRLA paper: rows that combine a backbone with layer attention, registered with timm.

Settings: channels per head as in section 5.1, stages and stochastic depth as in appendix B.1.1. ResNets drop the
attention alone, with probability 0.2; EfficientNets and transformers let it share each block's own stochastic depth
(`drop_path_rate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import timm
from timm.models import register_model
from torch import nn

from .. import hosts
from ..mechanisms.mrla import Reading
from . import ceit  # noqa: F401  registers the CeiTs, which are backbones of rows below
from .config import config_like


@dataclass(frozen=True)
class Row:
    """A named model.

    Args:
        name: the name timm knows it by.
        backbone: the timm model it extends.
        mechanism: key of `interlayer.attach`.
        options: options of `interlayer.attach`.
        published_options, published_backbone: what differs in the authors' published model besides the reading.
        config: what differs from the backbone's configuration.
    """

    name: str
    backbone: str
    mechanism: str
    options: Mapping[str, Any] = field(default_factory=dict)
    published_options: Mapping[str, Any] = field(default_factory=dict)
    published_backbone: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def _rows() -> list[Row]:
    rows = []
    resnet = {"drop_path": 0.2, "channels_per_head": 32}
    shared = {"drop_path": "backbone"}
    published_base = {"channels_per_head": 16}
    published_stem = {"stem_type": "deep", "stem_width": 32}
    for depth in (18, 34, 50, 101, 152):
        backbone = f"resnet{depth}"
        rows += [
            Row(f"{backbone}_mrla_light", backbone, "mrla_light", resnet),
            Row(f"{backbone}_mrla_base", backbone, "mrla_base", resnet, published_base, published_stem),
        ]
    rows += [
        Row("resnet50_mla", "resnet50", "mla", resnet),
        Row("resnet50_mrla_linear", "resnet50", "mrla_linear", resnet),
    ]
    others = [
        ("efficientnet_b0", "efficientnet_b0", {**shared, "channels_per_head": 8}, {}),
        ("efficientnet_b1", "efficientnet_b1", {**shared, "channels_per_head": 8}, {"input_size": (3, 240, 240)}),
        *((f"deit_{size}", f"deit_{size}_patch16_224", {**shared, "channels_per_head": 16}, {}) for size in SIZES),
        *((f"ceit_{size}", f"ceit_{size}", {**shared, "channels_per_head": 16}, {}) for size in SIZES[:2]),
        *((f"pvt_v2_{size}", f"pvt_v2_{size}", {**shared, "channels_per_head": 16}, {}) for size in ("b0", "b1")),
    ]
    for family, backbone, options, config in others:
        rows += [
            Row(f"{family}_mrla_{kind}", backbone, f"mrla_{kind}", options, config=config) for kind in ("light", "base")
        ]
    return rows


SIZES = ("tiny", "small", "base")
ROWS = {row.name: row for row in _rows()}
default_cfgs = {name: config_like(row.backbone, **row.config) for name, row in ROWS.items()}


def build(
    row: Row,
    pretrained: bool = False,
    *,
    reading: Reading = "paper",
    attention: Mapping[str, Any] | None = None,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: Any = None,
    cache_dir: Any = None,
    **backbone_options: Any,
) -> nn.Module:
    """Build a row's backbone through timm and attach its mechanism.

    Args:
        row: the named model.
        pretrained: must be False: no weights of these models are distributed.
        reading: "paper", or "published" for the authors' program, other stem and heads included where it has them.
        pretrained_cfg_overlay: entries of the model's configuration to replace, such as its mean and std.
        attention: options of `interlayer.attach` that replace the row's, such as {"drop_path": 0.0}.
        backbone_options: anything `timm.create_model` takes for the backbone.
    """
    if pretrained:
        raise RuntimeError(
            f"no pretrained weights of {row.name} exist; to start from the backbone's: interlayer.attach("
            f"timm.create_model({row.backbone!r}, pretrained=True), {row.mechanism!r}, init='identity')"
        )
    options = dict(row.options)
    if "reading" in (attention or {}):
        raise ValueError("give reading= to create_model itself: the backbone depends on it too")
    if reading == "published":
        options |= row.published_options
        backbone_options = {**row.published_backbone, **backbone_options}
    model = timm.create_model(row.backbone, pretrained=False, **backbone_options)
    config = {**(model.pretrained_cfg or {}), **default_cfgs[row.name], "architecture": row.name}
    config |= pretrained_cfg_overlay or {}
    config["num_classes"] = backbone_options.get("num_classes", config["num_classes"])
    model.pretrained_cfg = model.default_cfg = config  # type: ignore[assignment]
    return hosts.attach(model, row.mechanism, reading=reading, **{**options, **(attention or {})})


def _register(row: Row) -> None:
    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return build(row, pretrained, **kwargs)

    entrypoint.__name__ = entrypoint.__qualname__ = row.name
    entrypoint.__doc__ = f"{row.backbone} with {row.mechanism} attached; see `interlayer.models.mrla.build`."
    register_model(entrypoint)


for _row in ROWS.values():
    _register(_row)
