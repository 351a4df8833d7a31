"""`interlayer plot heads`: accuracy by the number of heads."""

from pathlib import Path
from typing import Annotated

import typer

from .figure import Overwrite, check_output, save


def heads(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of finished runs or comparisons, or folders of them."),
    ],
    output: Annotated[Path, typer.Option(help="The figure to write.")] = Path("heads.png"),
    overwrite: Overwrite = False,
) -> None:
    """Plot the accuracy of runs, or the headline metric of their task, by the number of heads (CB, Figure 9).

    The number of heads is that of the built networks. Runs that differ only in it and in the seed are one curve, with
    intervals over seeds. Differences to the plain network are paired by seed. To make such runs, compare networks with
    model_options.num_heads=1, then 2, and so on.

    Example: `interlayer plot heads runs/heads1 runs/heads2 runs/heads4`
    """
    from rich.console import Console
    from rich.table import Table

    from interlayer.analysis import plot_heads
    from interlayer.experiments.heads import group_runs, heads_curve, heads_gains, read_heads_runs

    check_output(output, overwrite)
    metric, found = read_heads_runs(runs)
    groups = group_runs(found)
    curves = {name: heads_curve(group) for name, group in groups.items()}
    gains = heads_gains(groups)
    table = Table(caption="±: 95% interval over seeds")
    table.add_column("network", overflow="fold")
    for column in ("heads", metric.title, "seeds", "difference to plain"):
        table.add_column(column, justify="right")
    for name, points in curves.items():
        by_heads = {point.heads: point for point in gains.get(name, ())}
        for point in points:
            value, gain = metric.format(point.mean), ""
            if point.half_width is not None:
                value += f" ± {metric.format_spread(point.half_width)}"
            if point.heads in by_heads:
                difference = by_heads[point.heads]
                gain = metric.format_difference(difference.mean)
                if difference.half_width is not None:
                    gain += f" ± {metric.format_spread(difference.half_width)}"
            table.add_row(name, f"{point.heads:g}", value, str(point.seeds), gain)
    Console().print(table)
    save(plot_heads(curves, metric, gains=gains), output)
