"""A row of a table of a paper, and its comparison with the figures counted by this library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Units:
    """Units of the figures in a table, and the number of decimals printed.

    Args:
        parameters: the unit of parameters.
        flops: the unit of multiply-adds.
        parameter_decimals: the number of decimals with which parameters are printed.
        flop_decimals: the number of decimals with which FLOPs are printed.
        quoted_decimals: for figures quoted from another paper as if its millions and billions were 2^20 and 2^30, the
            number of decimals in that paper: a count of 25,690,345 is 25.69, which is printed as 25.69 * 1.048576.
    """

    parameters: float = 1e6
    flops: float = 1e9
    parameter_decimals: int = 1
    flop_decimals: int = 1
    quoted_decimals: int | None = None

    @property
    def quoted(self) -> bool:
        """Whether the figures are quoted from another paper, in units that differ from its own."""
        return self.quoted_decimals is not None

    def in_parameters(self, count: int) -> float:
        """Returns a number of parameters as it would be printed, before rounding."""
        return self._quoted(count / self.parameters, 2**20 / 1e6)

    def in_flops(self, count: int) -> float:
        """Returns a number of multiply-adds as it would be printed, before rounding."""
        return self._quoted(count / self.flops, 2**30 / 1e9)

    def _quoted(self, figure: float, factor: float) -> float:
        return figure if self.quoted_decimals is None else round(figure, self.quoted_decimals) * factor


@dataclass(frozen=True)
class PaperRow:
    """A row of a table of a paper, for a model of this library or of timm.

    Args:
        table: number of the table.
        label: label of the row, as printed.
        model: name of the model, or NAME+MECHANISM; "" for a network that neither this library nor timm has.
        parameters: printed number of parameters, in `units`; None if there is none.
        flops: printed multiply-adds, in `units`; None if there are none that can be compared.
        top1: printed accuracy in percent, which is shown but not compared.
        attention: options of `interlayer.attach` that differ from those of the named model.
        options: options of `timm.create_model`.
        count: which parameters the paper counts: those of "layers", "all", "with_statistics" (all, and the running
            statistics of norms) or "without_layer_norms" (all but those of LayerNorms).
        flop_count: whether the printed FLOPs follow the convention "paper" or "torch"; see `count_flops`.
        image_size: size of the input if it differs from the default of the model.
        strides_first: whether the FLOPs are those of a ResNet that strides in the first 1x1 convolution of a block, as
            the original ResNets do.
        units: units of the figures.
        parameters_differ: the reason if the parameters are not compared.
        flops_differ: the reason if the FLOPs are not compared.
    """

    table: str
    label: str
    model: str
    parameters: float | None
    flops: float | None = None
    top1: float | None = None
    attention: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    count: Literal["layers", "all", "with_statistics", "without_layer_norms"] = "layers"
    flop_count: Literal["paper", "torch"] = "paper"
    image_size: int | None = None
    strides_first: bool = False
    units: Units = Units()
    parameters_differ: str = ""
    flops_differ: str = ""


@dataclass(frozen=True)
class CountedRow:
    """A row of a paper and the counted figures in its units; None for a network that does not exist here."""

    row: PaperRow
    parameters: float | None
    flops: float | None
    torch_flops: float | None

    @property
    def parameters_agree(self) -> bool:
        return _agrees(self.row.parameters, self.parameters, self.row.units.parameter_decimals)

    @property
    def compared_flops(self) -> float | None:
        """The counted FLOPs by the convention of the row."""
        return self.flops if self.row.flop_count == "paper" else self.torch_flops

    @property
    def flops_agree(self) -> bool:
        return _agrees(self.row.flops, self.compared_flops, self.row.units.flop_decimals)

    @property
    def unexplained(self) -> list[str]:
        """The names of figures that differ without a reason."""
        checks = [
            ("parameters", self.parameters_agree, self.row.parameters_differ),
            ("FLOPs", self.flops_agree, self.row.flops_differ),
        ]
        return [name for name, agrees, reason in checks if not agrees and not reason]


def _agrees(printed: float | None, counted: float | None, decimals: int) -> bool:
    """Returns whether the figures are equal when rounded as printed. A figure that is not printed always agrees."""
    if printed is None:
        return True
    return counted is not None and f"{counted:.{decimals}f}" == f"{printed:.{decimals}f}"
