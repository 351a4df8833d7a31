"""`interlayer plot`: pictures of what a trained network has learnt."""

from pathlib import Path
from typing import Annotated

import typer

plot = typer.Typer(
    no_args_is_help=True,
    help="Draw what a trained network has learnt.\n\nExample: `interlayer plot shared-weights weights.safetensors`",
)


@plot.command("shared-weights")
def shared_weights(
    checkpoints: Annotated[
        list[Path], typer.Argument(metavar="CHECKPOINT...", help="Weights of Shared-Lag or Shared-Ordinal DenseNets.")
    ],
    output: Annotated[Path, typer.Option(help="The picture to write.")] = Path("shared-weights.png"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the picture where it exists.")] = False,
) -> None:
    """Draw the L1 norm of the shared 1x1 weights of a DenseNet by lag or by ordinal, with exponential fits (Figure 2).

    Example: `interlayer plot shared-weights runs/lag/weights.safetensors runs/ordinal/weights.safetensors`
    """
    from rich.console import Console
    from rich.table import Table

    from interlayer.analysis import plot_shared_weights, shared_weights
    from interlayer.models.checkpoints import read_checkpoint, unwrap

    if output.exists() and not overwrite:
        raise ValueError(f"{output} exists; give --overwrite to replace it")
    if not output.parent.is_dir():
        raise ValueError(f"{output.parent}: no such folder")
    panels = {}
    for path in checkpoints:
        state_dict, descriptions = read_checkpoint(path)
        sharing = {entry["sharing"] for entry in descriptions.values() if "sharing" in entry}
        by = sharing.pop() if len(sharing) == 1 else "lag or ordinal"
        growth = {int(entry["growth"]) for entry in descriptions.values() if "growth" in entry}
        try:
            panels[str(path)] = (
                by,
                shared_weights(unwrap(state_dict), growth=growth.pop() if len(growth) == 1 else 12),
            )
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    figure = plot_shared_weights(list(panels.values()))
    try:
        figure.savefig(output, dpi=150)
    except ValueError as error:  # a suffix matplotlib does not know
        raise ValueError(f"{output} cannot be written: {error}") from error
    table = Table("checkpoint", "shared by", "stage", "decay", "R²")
    for path_name, (by, stages) in panels.items():
        for stage in stages:
            table.add_row(path_name, by, str(stage.stage), f"{stage.rate:.3f}", f"{stage.r_squared:.2f}")
    Console().print(table)
    typer.echo(f"drawn in {output}")
