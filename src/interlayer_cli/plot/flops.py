"""`interlayer plot flops`: FLOPs by the size of the image."""

from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from .figure import Overwrite, check_output, save

SIZES = "128,160,192,224,256,288,320,384"


def flops(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="NAME, or NAME+MECHANISM:OPTION=VALUE. No weights are used.")
    ],
    sizes: Annotated[str, typer.Option(help="Sizes of square images in pixels, separated by commas.")] = SIZES,
    convention: Annotated[
        str, typer.Option(help="torch: convolutions and all matrix products; paper: as MRLA and RLA count.")
    ] = "torch",
    output: Annotated[Path, typer.Option(help="The figure to write.")] = Path("flops.png"),
    overwrite: Overwrite = False,
) -> None:
    """Plot multiply-adds by the size of the image, and those that a mechanism adds to its plain network (MRLA, Fig. 5).

    Nothing is computed: networks are built for each size without memory for their weights. A size that a network does
    not accept is named and left out. Sums and products of elements are not counted, so MRLA-base adds as much as
    MRLA-light; `interlayer plot depth` measures their time.

    Example: `interlayer plot flops ceit_tiny_mrla_light`

    Example: `interlayer plot flops resnet50+mrla_light resnet50+mrla_base --sizes 160,224,288`
    """
    from rich.console import Console
    from rich.table import Table

    from interlayer import analysis
    from interlayer.models.build import plain_name

    from ..display import counting

    check_output(output, overwrite)
    if convention not in ("torch", "paper"):
        raise ValueError(f"--convention must be torch or paper, got {convention!r}")
    try:
        chosen = [int(size) for size in sizes.split(",")]
    except ValueError:
        raise ValueError(f"--sizes takes whole numbers separated by commas, such as 128,224, got {sizes!r}") from None
    counts = len({*models, *(plain_name(model) for model in models)}) * len(set(chosen))
    done = count()
    with counting("counting") as progress:
        curves = analysis.flops_by_size(
            models,
            chosen,
            convention=convention,  # type: ignore[arg-type]
            progress=lambda what: progress(next(done), counts, what),
        )
    table = Table(caption="FLOPs: multiply-adds of one image")
    table.add_column("network", overflow="fold")
    for column in ("image", "GFLOPs", "added, MFLOPs", "added, %"):
        table.add_column(column, justify="right")
    for curve in curves:
        for index, size in enumerate(curve.sizes):
            row = [curve.name, f"{size} x {size}", f"{curve.flops[index] / 1e9:.3f}"]
            if curve.added is not None and curve.plain is not None:
                added = curve.added[index]
                row += [f"{added / 1e6:.2f}", f"{100 * added / curve.plain[index]:.2f}"]
            table.add_row(*row)
    Console().print(table)
    for curve in curves:
        for size, reason in curve.refused.items():
            typer.echo(f"interlayer: {curve.name} at {size} pixels is left out: {reason}", err=True)
        if curve.line is not None and len(curve.sizes) > 2:
            typer.echo(
                f"{curve.name} adds {curve.line.slope:,.0f} multiply-adds per pixel "
                f"(linear in the number of pixels with R² = {curve.line.r_squared:.6f})"
            )
    save(analysis.plot_flops_by_size(curves), output)
