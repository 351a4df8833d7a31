"""Comparison of the parameters and FLOPs printed in the papers with those counted by this library."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import timm
import torch
from torch import nn

from .. import models  # noqa: F401  registers the models with timm
from ..analysis.cost import count_flops_both_ways, count_parameters
from .cb import cb_rows
from .halonet import halonet_rows
from .mrla import mrla_rows
from .rest import rest_rows
from .rla import rla_rows
from .row import CountedRow, PaperRow

TABLES: dict[str, Callable[[], list[PaperRow]]] = {
    "mrla": mrla_rows,
    "rla": rla_rows,
    "halonet": halonet_rows,
    "cb": cb_rows,
    "rest": rest_rows,
}


def count_rows(paper: str, tables: Collection[str] | None = None) -> Iterator[CountedRow]:
    """Yields the counted rows of the tables of a paper, or of some of them, one at a time."""
    if paper not in TABLES:
        raise ValueError(f"unknown paper {paper!r}, expected one of {', '.join(TABLES)}")
    counted: dict[str, tuple[dict[str, int], int, int]] = {}
    for row in TABLES[paper]():
        if tables is not None and row.table not in tables:
            continue
        if not row.model:
            yield CountedRow(row, None, None, None)
            continue
        key = f"{row.model} {sorted(row.attention.items())} {sorted(row.options.items())} {row.image_size}"
        if key not in counted:
            counted[key] = _count(row)
        parameters, flops, torch_flops = counted[key]
        units = row.units
        yield CountedRow(row, parameters[row.count] / units.parameters, flops / units.flops, torch_flops / units.flops)


@torch.no_grad()
def _count(row: PaperRow) -> tuple[dict[str, int], int, int]:
    """Returns the parameters by each `count`, and the multiply-adds by the conventions "paper" and "torch"."""
    options: dict[str, Any] = dict(row.options)
    if row.attention:
        options["attach_options"] = dict(row.attention)
    if row.image_size is not None and row.model.startswith("ceit"):
        options["img_size"] = row.image_size
    with torch.device("meta"):  # counting only needs shapes
        model = timm.create_model(row.model, **options)
    parameters = {"all": count_parameters(model), "layers": count_parameters(model, layers_only=True)}
    parameters["with_statistics"] = parameters["all"] + _statistics(model)
    norms = (module for module in model.modules() if isinstance(module, nn.LayerNorm))
    parameters["without_layer_norms"] = parameters["all"] - sum(count_parameters(norm) for norm in norms)
    return parameters, *count_flops_both_ways(model, row.image_size)


def _statistics(model: nn.Module) -> int:
    return sum(buffer.numel() for name, buffer in model.named_buffers() if ".running_" in f".{name}")
