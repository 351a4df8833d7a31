"""`interlayer plot`: figures of trained networks."""

from pathlib import Path
from typing import Annotated, Any

import typer

plot = typer.Typer(
    no_args_is_help=True,
    help="Plot what a trained network has learned.\n\nExample: `interlayer plot shared-weights weights.safetensors`",
)
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the figure if it exists.")]


@plot.command("layer-scores")
def layer_scores(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="NAME, or NAME+MECHANISM:OPTION=VALUE.")],
    weights: Annotated[Path | None, typer.Option(help="Weights of the model; random by default.")] = None,
    image: Annotated[Path | None, typer.Option(help="An image file; a sample photograph by default.")] = None,
    output: Annotated[Path, typer.Option(help="The figure to write.")] = Path("layer-scores.png"),
    overwrite: Overwrite = False,
) -> None:
    """Plot the attention scores between the layers of a network with layer attention, for one image.

    Example: `interlayer plot layer-scores resnet50+mrla_base --weights runs/base/weights.safetensors`
    """
    from interlayer import analysis
    from interlayer.models.build import build_network

    from .images import photograph

    _check_output(output, overwrite)
    network = build_network(model, weights=None if weights is None else str(weights))
    scores = analysis.layer_scores(network, photograph(network, image))
    title = f"Which layer reads which: {model}" + ("" if weights else ", untrained")
    _save(analysis.plot_layer_scores(scores, title=title), output)
    typer.echo(f"drawn in {output}")


@plot.command("shared-weights")
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

    _check_output(output, overwrite)
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
    _save(plot_shared_weights(list(panels.values())), output)
    table = Table("checkpoint", "shared by", "stage", "decay", "R²")
    for path_name, (by, stages) in panels.items():
        for stage in stages:
            table.add_row(path_name, by, str(stage.stage), f"{stage.rate:.3f}", f"{stage.r_squared:.2f}")
    Console().print(table)
    typer.echo(f"drawn in {output}")


def _check_output(output: Path, overwrite: bool) -> None:
    if output.exists() and not overwrite:
        raise ValueError(f"{output} exists; give --overwrite to replace it")
    if not output.parent.is_dir():
        raise ValueError(f"{output.parent}: no such folder")


def _save(figure: Any, output: Path) -> None:
    try:
        figure.savefig(output, dpi=150)
    except ValueError as error:  # matplotlib does not support the suffix
        raise ValueError(f"{output} cannot be written: {error}") from error
