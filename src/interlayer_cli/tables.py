"""`interlayer tables`: the papers' figures beside ours."""

from typing import Annotated

import typer


def tables(paper: Annotated[str, typer.Argument(help="The paper: mrla.")] = "mrla") -> None:
    """Print a paper's parameters and FLOPs beside those counted here; exit 1 if a row that should agree does not.

    Parameters in millions, FLOPs in billions of multiply-adds. The FLOPs compared are counted by the papers'
    convention; those of torch's own counter are shown. A figure marked * is one that no reading reproduces:
    docs/deviations.md says what was tried.

    Example: `interlayer tables mrla`
    """
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from interlayer.analysis.tables import TABLES, count_rows

    if paper not in TABLES:
        raise ValueError(f"unknown paper {paper!r}, expected one of {', '.join(TABLES)}")
    table = Table(title=f"{paper}: the paper's figures and ours", caption="* not reproduced, see docs/deviations.md")
    for column in ("table", "row", "model"):
        table.add_column(column)
    for column in ("params, paper", "ours", "diff", "FLOPs, paper", "ours", "diff", "torch's", "top-1, paper"):
        table.add_column(column, justify="right")
    unexplained = []
    rows = TABLES[paper]()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("counting", total=len(rows))
        for counted in count_rows(paper):
            row = counted.row
            progress.update(task, advance=1, description=row.label)
            table.add_row(
                row.table,
                row.label,
                row.model,
                f"{row.parameters:.1f}",
                f"{counted.parameters:.3f}",
                _difference(row.parameters, counted.parameters, counted.parameters_agree, row.parameters_differ),
                f"{row.flops:.1f}",
                f"{counted.flops:.3f}",
                _difference(row.flops, counted.flops, counted.flops_agree, row.flops_differ),
                f"{counted.torch_flops:.3f}",
                "" if row.top1 is None else f"{row.top1:.1f}",
            )
            unexplained += [f"table {row.table}, {row.label}: {what}" for what in counted.unexplained]
    Console(width=None if Console().is_terminal else 190).print(table)
    if unexplained:
        for what in unexplained:
            typer.echo(f"interlayer: does not agree with the paper: {what}", err=True)
        raise typer.Exit(1)
    typer.echo(f"{len(rows)} rows: every figure that should agree does.")


def _difference(printed: float, counted: float, agrees: bool, reason: str) -> str:
    difference = f"{counted - printed:+.3f}"
    return difference if agrees else f"[yellow]{difference} *[/]" if reason else f"[red]{difference} ![/]"
