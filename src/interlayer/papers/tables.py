"""Comparison of the parameters and FLOPs printed in the papers with those counted by this library."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import timm
import torch
from timm.models.resnet import Bottleneck
from torch import nn

from .. import models
from ..analysis.cost import count_flops_both_ways, count_parameters
from ..analysis.shapes import Memory, RememberedShapes
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
    building: Memory = {}
    counting: Memory = {}
    for row in TABLES[paper]():
        if tables is not None and row.table not in tables:
            continue
        if not row.model:
            yield CountedRow(row, None, None, None)
            continue
        options = sorted(row.attention.items()), sorted(row.options.items())
        key = f"{row.model} {options} {row.image_size} {row.strides_first}"
        if key not in counted:
            counted[key] = _count(row, building, counting)
        parameters, flops, torch_flops = counted[key]
        counts = (row.units.in_flops(count) for count in (flops, torch_flops))
        yield CountedRow(row, row.units.in_parameters(parameters[row.count]), *counts)


@torch.no_grad()
def _count(row: PaperRow, building: Memory, counting: Memory) -> tuple[dict[str, int], int, int]:
    """Returns the parameters by each `count`, and the multiply-adds by the conventions "paper" and "torch".

    Args:
        row: the row.
        building: shapes of operators that were run to build networks.
        counting: shapes and FLOPs of operators that were counted.
    """
    with torch.device("meta"), RememberedShapes(building):  # counting only needs shapes
        model = _create(row)
    parameters = {"all": count_parameters(model), "layers": count_parameters(model, layers_only=True)}
    parameters["with_statistics"] = parameters["all"] + _statistics(model)
    norms = (module for module in model.modules() if isinstance(module, nn.LayerNorm))
    parameters["without_layer_norms"] = parameters["all"] - sum(count_parameters(norm) for norm in norms)
    if row.strides_first:
        _stride_first(model)
    return parameters, *count_flops_both_ways(model, row.image_size, counting)


def _create(row: PaperRow) -> nn.Module:
    options: dict[str, Any] = dict(row.options)
    if "+" in row.model:
        return models.build_network(row.model, model_options=options, attach_options=row.attention)
    if row.attention:
        options["attach_options"] = dict(row.attention)
    if row.image_size is not None and row.model.startswith("ceit"):
        options["img_size"] = row.image_size
    return timm.create_model(row.model, **options)


def _stride_first(model: nn.Module) -> None:
    """Move the stride of every bottleneck from its 3x3 convolution to its first 1x1 convolution."""
    for module in model.modules():
        if isinstance(module, Bottleneck):
            module.conv1.stride, module.conv2.stride = module.conv2.stride, module.conv1.stride


def _statistics(model: nn.Module) -> int:
    return sum(buffer.numel() for name, buffer in model.named_buffers() if ".running_" in f".{name}")
