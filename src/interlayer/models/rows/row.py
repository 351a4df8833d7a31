"""Named models as rows of data: a backbone, a mechanism attached to it, and their options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import timm
from timm.models import load_pretrained, register_model
from torch import nn

from ... import hosts
from ...mechanisms.options import Reading
from ..config import config_like


@dataclass(frozen=True)
class Row:
    """A named model.

    Args:
        name: name of the model in timm.
        backbone: name of the timm model that it extends.
        mechanism: key of `interlayer.attach`; "" for a model that differs from the backbone only by its options.
        options: options of `interlayer.attach`.
        companion: key of a mechanism that is attached first, such as "eca".
        backbone_options: options of the backbone.
        published_options: options of `interlayer.attach` that differ in the authors' published model.
        published_companion: options of the companion that differ in the authors' published model.
        published_backbone: options of the backbone that differ in the authors' published model.
        config: entries that differ from the configuration of the backbone.
    """

    name: str
    backbone: str
    mechanism: str
    options: Mapping[str, Any] = field(default_factory=dict)
    companion: str = ""
    backbone_options: Mapping[str, Any] = field(default_factory=dict)
    published_options: Mapping[str, Any] = field(default_factory=dict)
    published_companion: Mapping[str, Any] = field(default_factory=dict)
    published_backbone: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_readings(self) -> bool:
        """Whether the model of the authors' program can differ from that of the paper's text."""
        differences = (self.published_options, self.published_companion, self.published_backbone)
        return any(differences) or (bool(self.mechanism) and "reading" in hosts.options_of(self.mechanism))


ROWS: dict[str, Row] = {}
default_cfgs: dict[str, dict[str, Any]] = {}  # timm reads this name


def register_rows(rows: Iterable[Row]) -> None:
    """Registers named models with timm."""
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
        pretrained: whether to load the weights that `pretrained_cfg` names; none are distributed with this library.
        reading: "paper", or "published" for the authors' program, including its stem and heads if they differ.
        attach_options: options of `interlayer.attach` that replace those of the row, such as {"drop_path": 0.0}.
        pretrained_cfg: the configuration of a stored model, passed by timm for local-dir:FOLDER and hf-hub:USER/NAME.
        pretrained_cfg_overlay: entries of the model's configuration to replace, such as its mean and std.
        cache_dir: the folder of downloaded weights; passed by timm.
        backbone_options: options of `timm.create_model` for the backbone.
    """
    stored = dict(pretrained_cfg) if isinstance(pretrained_cfg, Mapping) else {}
    if pretrained and not stored:
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
    if reading != "paper" and not row.has_readings:
        raise ValueError(f"there is one reading of {row.name}: leave reading out")
    options = dict(row.options)
    companion_options: dict[str, Any] = {}
    row_options = dict(row.backbone_options)
    if reading == "published":
        options |= row.published_options
        companion_options |= row.published_companion
        row_options |= row.published_backbone
    if stored:
        backbone_options.setdefault("num_classes", stored["num_classes"])
    model = timm.create_model(row.backbone, pretrained=False, **{**row_options, **backbone_options})
    config = {**(model.pretrained_cfg or {}), **default_cfgs[row.name], "architecture": row.name}
    config |= {**stored, **(pretrained_cfg_overlay or {})}
    config["num_classes"] = backbone_options.get("num_classes", config["num_classes"])
    model.pretrained_cfg = model.default_cfg = config  # type: ignore[assignment]
    if row.companion:
        hosts.attach(model, row.companion, **companion_options)
    if row.mechanism:
        if "reading" in hosts.options_of(row.mechanism):
            options["reading"] = reading
        hosts.attach(model, row.mechanism, **{**options, **(attach_options or {})})
    if pretrained:
        load_pretrained(model, {**config, **stored}, num_classes=config["num_classes"], cache_dir=cache_dir)
    return model
