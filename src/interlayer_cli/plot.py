"""`interlayer plot`: figures of trained networks."""

from pathlib import Path
from typing import Annotated, Any

import typer

plot = typer.Typer(
    no_args_is_help=True,
    help="Plot what a trained network has learned.\n\nExample: `interlayer plot scores runs/20250101-120000-resnet50`",
)
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the figure if it exists.")]


ImageFile = Annotated[
    Path | None, typer.Option(help="An image file; by default test images of a run, or a sample photograph.")
]
WeightsFile = Annotated[
    Path | None, typer.Option(help="Weights of a model, random by default; other weights of a run. Also weights=FILE.")
]


@plot.command("scores")
def scores(
    network: Annotated[
        str, typer.Argument(metavar="RUN|MODEL", help="Folder of a finished run, or NAME+MECHANISM:OPTION=VALUE.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[weights=FILE]", help="The same as --weights FILE.")
    ] = None,
    weights: WeightsFile = None,
    image: ImageFile = None,
    head: Annotated[int | None, typer.Option(min=0, help="One head; by default the mean over all heads.")] = None,
    output: Annotated[Path, typer.Option(help="The figure to write.")] = Path("scores.png"),
    overwrite: Overwrite = False,
) -> None:
    """Plot which layer reads which, in a network with layer attention, and say how much the mechanism contributes.

    All stages have the same color scale. Where weights of both signs would cancel, as with the lambda of MRLA-light, a
    cell is divided: the mean of the positive weights is at its upper left, that of the negative weights at its lower
    right. The network of a run is plotted for 64 of its test images.

    Example: `interlayer plot scores runs/20250101-120000-resnet50`

    Example: `interlayer plot scores resnet50+mrla_base weights=resnet50.safetensors --image photo.jpg`
    """
    for text in overrides or []:
        key, _, value = text.partition("=")
        if key != "weights" or not value:
            raise ValueError(f"expected weights=FILE, got {text!r}")
        weights = Path(value)
    _plot_scores(network, weights, image, head, output, overwrite)


@plot.command("layer-scores")
def layer_scores(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="NAME, or NAME+MECHANISM:OPTION=VALUE.")],
    weights: WeightsFile = None,
    image: ImageFile = None,
    output: Annotated[Path, typer.Option(help="The figure to write.")] = Path("layer-scores.png"),
    overwrite: Overwrite = False,
) -> None:
    """The same as `interlayer plot scores`.

    Example: `interlayer plot layer-scores resnet50+mrla_base --weights runs/base/weights.safetensors`
    """
    _plot_scores(model, weights, image, None, output, overwrite)


def _plot_scores(
    name: str, weights: Path | None, image: Path | None, head: int | None, output: Path, overwrite: bool
) -> None:
    from interlayer import analysis

    _check_output(output, overwrite)
    network, images, title = _network_of_run(Path(name), weights, image) or _network_of_name(name, weights, image)
    found = analysis.layer_scores(network, images)
    measured = analysis.contribution(network, images)
    shown = "1 image" if len(images) == 1 else f"{len(images)} images"
    note = f"{measured.change} ({shown})" if len(images) == 1 else f"{measured.change}; {measured.sentence} ({shown})"
    title = f"Which layer reads which: {title}" + ("" if head is None else f", head {head}")
    _save(analysis.plot_layer_scores(found, head=head, title=title, note=note), output)
    typer.echo(note)
    typer.echo(f"drawn in {output}")


def _network_of_run(folder: Path, weights: Path | None, image: Path | None) -> tuple[Any, Any, str] | None:
    """Returns the network of a run, some of its test images or the given one, and a title; None if it is no folder."""
    if not folder.is_dir():
        return None
    from interlayer.experiments import TrainedNetwork, open_test_images, some_test_images

    from .images import transformed

    trained = TrainedNetwork(folder, weights)
    if image is not None:
        pixels = transformed(image, trained.transform.evaluation())
        return trained.network, trained.batch_transform.normalize(pixels.to(trained.device)), trained.recipe.model
    images = open_test_images(trained)
    if images is None:
        raise ValueError(f"the test images of {folder} are a stream: give --image FILE")
    return trained.network, some_test_images(trained, images), trained.recipe.model


def _network_of_name(name: str, weights: Path | None, image: Path | None) -> tuple[Any, Any, str]:
    """Returns the network of this name, a photograph, and a title."""
    from interlayer.models.build import build_network

    from .images import photograph

    network = build_network(name, weights=None if weights is None else str(weights))
    return network, photograph(network, image), name + ("" if weights else ", untrained")


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
    figure.draw_without_rendering()  # a constrained layout fits its labels only when it is computed a second time
    try:
        figure.savefig(output, dpi=150)
    except ValueError as error:  # matplotlib does not support the suffix
        raise ValueError(f"{output} cannot be written: {error}") from error
