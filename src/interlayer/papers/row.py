"""A row of a paper's table, and what it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Units:
    """What a table counts in, and how many decimals it prints."""

    parameters: float = 1e6
    flops: float = 1e9
    parameter_decimals: int = 1
    flop_decimals: int = 1


@dataclass(frozen=True)
class PaperRow:
    """A row of a paper's table that names a model of this library, its backbone, or one of timm's.

    Args:
        table: the table's number.
        label: the row as printed.
        model: the model's name; "" for a network that is not to be had here.
        parameters: printed, in `units`.
        flops: printed multiply-adds, in `units`; None where none are printed that could be compared.
        top1: printed accuracy in percent, shown and not compared.
        options: options of `timm.create_model`; `attention` gives options of `interlayer.attach` that the row changes.
        count: whether the printed parameters count those of "layers", "all", also the moving statistics of norms, or
            all but those of LayerNorms.
        flop_count: whether the printed FLOPs are counted by the papers' convention or by torch's counter.
        image_size: the input's size where it is not the usual one.
        units: what the figures are in.
        parameters_differ, flops_differ: why the figure is not compared, where it is not.
    """

    table: str
    label: str
    model: str
    parameters: float
    flops: float | None = None
    top1: float | None = None
    attention: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    count: Literal["layers", "all", "with_statistics", "without_layer_norms"] = "layers"
    flop_count: Literal["paper", "torch"] = "paper"
    image_size: int | None = None
    units: Units = Units()
    parameters_differ: str = ""
    flops_differ: str = ""


@dataclass(frozen=True)
class CountedRow:
    """A paper's row and what was counted here, in the paper's units; None where there is nothing to count."""

    row: PaperRow
    parameters: float | None
    flops: float | None
    torch_flops: float | None

    @property
    def parameters_agree(self) -> bool:
        return _agrees(self.row.parameters, self.parameters, self.row.units.parameter_decimals)

    @property
    def compared_flops(self) -> float | None:
        """By the convention that the row is printed in."""
        return self.flops if self.row.flop_count == "paper" else self.torch_flops

    @property
    def flops_agree(self) -> bool:
        return _agrees(self.row.flops, self.compared_flops, self.row.units.flop_decimals)

    @property
    def unexplained(self) -> list[str]:
        """The figures that should agree and do not."""
        checks = [
            ("parameters", self.parameters_agree, self.row.parameters_differ),
            ("FLOPs", self.flops_agree, self.row.flops_differ),
        ]
        return [name for name, agrees, reason in checks if not agrees and not reason]


def _agrees(printed: float | None, counted: float | None, decimals: int) -> bool:
    """Equal when rounded as printed; nothing printed agrees with anything."""
    if printed is None:
        return True
    return counted is not None and f"{counted:.{decimals}f}" == f"{printed:.{decimals}f}"
