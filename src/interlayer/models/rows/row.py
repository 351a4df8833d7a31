"""A named model as a row of data: a backbone, the mechanism attached to it, and its options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import timm
from timm.models import register_model
from torch import nn

from ... import hosts
from ...mechanisms.options import Reading
from ..config import config_like


@dataclass(frozen=True)
class Row:
    """A named model.

    Args:
        name: the name timm knows it by.
        backbone: the timm model it extends.
        mechanism: key of `interlayer.attach`; "" for a model that differs from the backbone by its options alone.
        options: options of `interlayer.attach`.
        companion: a mechanism attached before, such as "eca".
        backbone_options: what the backbone is built with.
        published_options, published_backbone: what differs in the authors' published model besides the reading.
        config: what differs from the backbone's configuration.
    """

    name: str
    backbone: str
    mechanism: str
    options: Mapping[str, Any] = field(default_factory=dict)
    companion: str = ""
    backbone_options: Mapping[str, Any] = field(default_factory=dict)
    published_options: Mapping[str, Any] = field(default_factory=dict)
    published_backbone: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


ROWS: dict[str, Row] = {}
default_cfgs: dict[str, dict[str, Any]] = {}  # timm looks for it here


def register_rows(rows: Iterable[Row]) -> None:
    """Registers the models with timm."""
    for row in rows:
        ROWS[row.name] = row
        default_cfgs[row.name] = config_like(row.backbone, **row.config)
        _register(row)


def _register(row: Row) -> None:
    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return build(row, pretrained, **kwargs)

    what = " and ".join(filter(None, (row.companion, row.mechanism)))
    entrypoint.__name__ = entrypoint.__qualname__ = row.name
    attached = f" with {what} attached" if what else ""
    entrypoint.__doc__ = f"{row.backbone}{attached}; see `interlayer.models.rows.row.build`."
    register_model(entrypoint)


def build(
    row: Row,
    pretrained: bool = False,
    *,
    reading: Reading = "paper",
    attach_options: Mapping[str, Any] | None = None,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: Any = None,
    cache_dir: Any = None,
    **backbone_options: Any,
) -> nn.Module:
    """Builds the backbone of a row through timm and attaches the mechanism.

    Args:
        row: the named model.
        pretrained: must be False: no weights of these models are distributed.
        reading: "paper", or "published" for the authors' program, other stem and heads included where it has them.
        pretrained_cfg_overlay: entries of the model's configuration to replace, such as its mean and std.
        attach_options: options of `interlayer.attach` that replace the row's, such as {"drop_path": 0.0}.
        backbone_options: anything `timm.create_model` takes for the backbone.
    """
    if pretrained:
        names = [name for name in (row.companion, row.mechanism) if name]
        start = f"timm.create_model({row.backbone!r}, pretrained=True)"
        for name in names:
            identity = ", init='identity'" if "init" in hosts.options_of(name) else ""
            start = f"interlayer.attach({start}, {name!r}{identity})"
        raise RuntimeError(
            f"no pretrained weights of {row.name} exist" + (f"; to start from the backbone's: {start}" if names else "")
        )
    if "reading" in (attach_options or {}):
        raise ValueError("give reading= to create_model itself: the backbone depends on it too")
    if not row.mechanism and (attach_options or reading != "paper"):
        raise ValueError(f"nothing is attached in {row.name}, so it has neither attach_options nor another reading")
    options = dict(row.options)
    built_with = dict(row.backbone_options)
    if reading == "published":
        options |= row.published_options
        built_with |= row.published_backbone
    model = timm.create_model(row.backbone, pretrained=False, **{**built_with, **backbone_options})
    config = {**(model.pretrained_cfg or {}), **default_cfgs[row.name], "architecture": row.name}
    config |= pretrained_cfg_overlay or {}
    config["num_classes"] = backbone_options.get("num_classes", config["num_classes"])
    model.pretrained_cfg = model.default_cfg = config  # type: ignore[assignment]
    if row.companion:
        hosts.attach(model, row.companion)
    if row.mechanism:
        if reading != "paper" or "reading" in hosts.options_of(row.mechanism):
            options["reading"] = reading
        hosts.attach(model, row.mechanism, **{**options, **(attach_options or {})})
    return model
