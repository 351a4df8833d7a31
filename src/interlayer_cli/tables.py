"""`interlayer tables`: compare parameters and FLOPs with the tables of the papers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table


def tables(
    paper: Annotated[str, typer.Argument(help="The paper: mrla, rla, halonet, cb or rest; or detection.")] = "mrla",
) -> None:
    """Print the parameters and FLOPs of a paper next to ours. The exit code is 1 if a row that should agree does not.

    Parameters and multiply-adds are in the units of the paper: millions and billions, or 2^20 and 2^30 in the ImageNet
    tables of RLA. FLOPs are counted by the convention of the paper, those of CB by torch's counter, which is printed
    for all papers. No reading of the paper reproduces the figures marked with *, for the reasons that are printed below
    the table and in docs/deviations.md. Rows marked with (q) are quoted from other papers, whose millions and billions
    were multiplied by 1.048576 and 1.0737; ours are multiplied alike, and FLOPs are those of torch's counter.

    `interlayer tables detection` prints the trainable parameters of MRLA's detectors and CB's UPerNets, the
    multiply-adds of the detectors at 1280 x 800, and the AP and mIoU that all papers report.

    Example: `interlayer tables rla`
    """
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from interlayer.papers.tables import TABLES, count_rows

    if paper == "detection":
        _detection()
        return
    if paper not in TABLES:
        raise ValueError(f"unknown paper {paper!r}, expected one of {', '.join([*TABLES, 'detection'])}")
    caption = "* not reproduced, see docs/deviations.md"
    rows = TABLES[paper]()
    if any(row.units.quoted for row in rows):
        caption += "; (q) quoted from another paper: parameters times 1.048576, torch's FLOPs times 1.0737"
    table = Table(title=f"{paper}: the paper's figures and ours", caption=caption)
    for column in ("table", "row", "model"):
        table.add_column(column)
    for column in ("params, paper", "ours", "diff", "FLOPs, paper", "ours", "diff", "torch's", "top-1, paper"):
        table.add_column(column, justify="right")
    unexplained = []
    reasons: list[str] = []  # one for each starred figure
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("counting", total=len(rows))
        for counted in count_rows(paper):
            row = counted.row
            progress.update(task, advance=1, description=row.label)
            units = row.units
            table.add_row(
                row.table,
                f"{row.label} (q)" if units.quoted else row.label,
                row.model,
                _figure(row.parameters, units.parameter_decimals),
                _figure(counted.parameters, 3),
                _difference(row.parameters, counted.parameters, counted.parameters_agree, row.parameters_differ),
                _figure(row.flops, units.flop_decimals),
                _figure(counted.flops, 3),
                _difference(row.flops, counted.compared_flops, counted.flops_agree, row.flops_differ),
                _figure(counted.torch_flops, 3),
                _figure(row.top1, 1),
            )
            reasons += [row.parameters_differ] if row.parameters_differ and not counted.parameters_agree else []
            reasons += [row.flops_differ] if row.flops_differ and not counted.flops_agree else []
            unexplained += [f"table {row.table}, {row.label}: {what}" for what in counted.unexplained]
    console = Console(width=None if Console().is_terminal else 190)
    console.print(table)
    if paper == "halonet":
        console.print(_scaling())
    for reason, figures in Counter(reasons).items():
        typer.echo(f"* {'1 figure' if figures == 1 else f'{figures} figures'}: {reason}")
    if unexplained:
        for what in unexplained:
            typer.echo(f"interlayer: does not agree with the paper: {what}", err=True)
        raise typer.Exit(1)
    typer.echo(f"{len(rows)} rows: every figure that should agree does. {_starred(len(reasons))}")


def _detection() -> None:
    """Prints the detectors and segmenters; the exit code is 1 if a number of parameters differs."""
    from rich.console import Console
    from rich.table import Table

    from interlayer.papers.detection import detection_rows

    table = Table(title="detectors and segmenters: the papers' figures and ours")
    for column in ("network", "backbone"):
        table.add_column(column)
    for column in ("trainable params, paper", "ours", "diff", "FLOPs at 1280 x 800, paper", "torch's, ours"):
        table.add_column(column, justify="right")
    rows = list(detection_rows())
    for row in rows:
        table.add_row(
            row.name,
            row.backbone,
            _figure(row.printed, row.decimals),
            _figure(row.parameters, 3),
            _difference(row.printed, row.parameters, row.agrees, ""),
            "" if row.printed_flops is None else f"{row.printed_flops:g}",
            _figure(row.flops, 2),
        )
    console = Console(width=None if Console().is_terminal else 190)
    console.print(table)
    console.print(_reported())
    different = [row for row in rows if not row.agrees]
    for row in different:
        typer.echo(f"interlayer: does not agree with the paper: {row.name}, {row.backbone}: parameters", err=True)
    if different:
        raise typer.Exit(1)
    typer.echo(f"{len(rows)} rows: every number of parameters agrees.")


def _reported() -> Table:
    """Returns the AP and mIoU that the papers report."""
    from rich.table import Table

    from interlayer.papers.reported import reported_rows

    table = Table(title="AP on COCO val2017 and mIoU on ADE20K as the papers report them, in percent")
    for column in ("paper", "table", "network", "row", "backbone"):
        table.add_column(column)
    columns = ("box AP", "AP50", "AP75", "mask AP", "AP50", "AP75", "mIoU, 40k", "160k")
    for column in columns:
        table.add_column(column, justify="right")
    for row in reported_rows():
        figures = (*row.boxes, *row.masks, *row.mean_iou)
        table.add_row(
            row.paper, row.table, row.network, row.label, row.backbone, *(_figure(value, 1) for value in figures)
        )
    return table


def _starred(count: int) -> str:
    """Says how many figures no reading of the paper reproduces."""
    if not count:
        return "No figure is starred."
    figures = "1 figure is starred" if count == 1 else f"{count} figures are starred"
    return f"{figures}: no reading of the paper reproduces {'it' if count == 1 else 'them'}, see docs/deviations.md."


def _scaling() -> Table:
    """Returns Table 1 of the HaloNet paper, computed by its formulas and measured."""
    from rich.table import Table

    from interlayer.papers.attention_scaling import attention_scaling

    table = Table(
        title="Table 1 for one image of 32 x 32 pixels, 64 channels, b = 8, h = 3, k = 7",
        caption="stored: elements of a copy of the keys; peak: in addition to the inputs, float32; fused: on a GPU",
    )
    table.add_column("way")
    for column in ("stored, formula", "gathered", "FLOPs a pixel, formula", "counted", "peak, gathered", "peak, fused"):
        table.add_column(column, justify="right")
    for row in attention_scaling():
        table.add_row(
            row.way,
            f"{row.elements:,}",
            f"{row.stored:,}",
            f"{row.flops_per_pixel:,}",
            f"{row.counted:,.0f}",
            f"{row.gathered_bytes / 2**20:.2f} MiB",
            "" if row.fused_bytes is None else f"{row.fused_bytes / 2**20:.2f} MiB",
        )
    return table


def _figure(value: float | None, decimals: int) -> str:
    return "" if value is None else f"{value:.{decimals}f}"


def _difference(printed: float | None, counted: float | None, agrees: bool, reason: str) -> str:
    difference = "" if printed is None or counted is None else f"{counted - printed:+.3f}"
    return difference if agrees else f"[yellow]{difference} *[/]" if reason else f"[red]{difference} ![/]"
