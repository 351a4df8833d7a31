"""`interlayer plot shared-weights`: how fast layers are forgotten."""

from pathlib import Path
from typing import Annotated

import typer

from .figure import Overwrite, check_output, naming, save


def shared_weights(
    checkpoints: Annotated[
        list[Path], typer.Argument(metavar="CHECKPOINT...", help="Weights of Shared-Lag or Shared-Ordinal DenseNets.")
    ],
    output: Annotated[Path, typer.Option(help="The figure to write.")] = Path("shared-weights.png"),
    overwrite: Overwrite = False,
) -> None:
    """Plot the L1 norm of the shared 1x1 weights of a DenseNet by lag or by ordinal, with exponential fits (Figure 2).

    Example: `interlayer plot shared-weights runs/lag/weights.safetensors runs/ordinal/weights.safetensors`
    """
    from rich.console import Console
    from rich.table import Table

    from interlayer.analysis import plot_shared_weights, shared_weights
    from interlayer.models.checkpoints import read_checkpoint, unwrap

    check_output(output, overwrite)
    panels = {}
    for path in checkpoints:
        state_dict, descriptions = read_checkpoint(path)
        sharing = {entry["sharing"] for entry in descriptions.values() if "sharing" in entry}
        by = sharing.pop() if len(sharing) == 1 else "lag or ordinal"
        growth = {int(entry["growth"]) for entry in descriptions.values() if "growth" in entry}
        with naming(str(path)):
            panels[str(path)] = (
                by,
                shared_weights(unwrap(state_dict), growth=growth.pop() if len(growth) == 1 else 12),
            )
    table = Table("checkpoint", "shared by", "stage", "decay", "R²")
    for path_name, (by, stages) in panels.items():
        for stage in stages:
            table.add_row(path_name, by, str(stage.stage), f"{stage.rate:.3f}", f"{stage.r_squared:.2f}")
    Console().print(table)
    save(plot_shared_weights(list(panels.values())), output)
