"""Table 1 of the appendix of the ResT paper, and the parameters and FLOPs of its four sizes from the main text."""

from __future__ import annotations

from .row import PaperRow, Units

# Reasons why printed figures are not compared. docs/deviations.md describes what was tried for each.
EMSA_PARAMETERS = "10,508,300 parameters, the published program's own, are printed as 10.49"
FLOPS = "no way of counting gives all four sizes"

TWO = Units(1e6, 1e9, 2, 1)


def rest_rows() -> list[PaperRow]:
    sizes = {
        "Lite": (10.5, 1.4, 77.2),
        "Small": (13.7, 1.9, 79.6),
        "Base": (30.3, 4.3, 81.6),
        "Large": (51.6, 7.9, 83.6),
    }
    return [
        PaperRow("1", "MSA", "rest_lite", 10.48, 1.6, 72.68, options={"attention": "msa"}, count="all", units=TWO),
        PaperRow(
            "1", "EMSA", "rest_lite", 10.49, 1.4, 72.88,
            count="all", units=TWO, parameters_differ=EMSA_PARAMETERS, flops_differ=FLOPS,
        ),
    ] + [
        PaperRow(
            "body", f"ResT-{size}", f"rest_{size.lower()}", parameters, flops, top1,
            count="without_layer_norms", flops_differ=FLOPS,
        )
        for size, (parameters, flops, top1) in sizes.items()
    ]  # fmt: skip
