"""`interlayer plot scores`: which layer reads which."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .figure import Overwrite, check_output, open_images, save

ImageFile = Annotated[
    Path | None, typer.Option(help="An image file; by default test images of a run, or a sample photograph.")
]
WeightsFile = Annotated[
    Path | None, typer.Option(help="Weights of a model, random by default; other weights of a run. Also weights=FILE.")
]


def scores(
    network: Annotated[
        str, typer.Argument(metavar="RUN|MODEL", help="Folder of a finished run, or NAME+MECHANISM:OPTION=VALUE.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[weights=FILE]", help="The same as --weights FILE.")
    ] = None,
    weights: WeightsFile = None,
    image: ImageFile = None,
    head: Annotated[
        str | None,
        typer.Option(metavar="N|all", help="One head, from 0, or all of them; by default the mean over all heads."),
    ] = None,
    stage: Annotated[
        list[int] | None,
        typer.Option(help="Only this stage, from 1; give it several times for several stages. By default all stages."),
    ] = None,
    output: Annotated[Path, typer.Option(help="The figure to write.")] = Path("scores.png"),
    overwrite: Overwrite = False,
) -> None:
    """Plot which layer reads which, in a network with layer attention, and say how much the mechanism contributes.

    All stages have the same color scale. Where weights of both signs would cancel, as with the lambda of MRLA-light, a
    cell is divided: the mean of the positive weights is at its upper left, that of the negative weights at its lower
    right. The network of a run is plotted for 64 of its test images. `--head all` shows every head in a small heatmap.

    Example: `interlayer plot scores runs/20250101-120000-resnet50`

    Example: `interlayer plot scores runs/20250101-120000-resnet50 --stage 3 --head all`

    Example: `interlayer plot scores resnet50+mrla_base weights=resnet50.safetensors --image photo.jpg`
    """
    for text in overrides or []:
        key, _, value = text.partition("=")
        if key != "weights" or not value:
            raise ValueError(f"expected weights=FILE, got {text!r}")
        weights = Path(value)
    if head is not None and head != "all" and not head.isdecimal():
        raise ValueError(f"--head takes the number of a head, from 0, or all, got {head!r}")
    chosen: Any = int(head) if head is not None and head != "all" else head
    _plot_scores(network, weights, image, output, overwrite, head=chosen, stages=stage)


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
    _plot_scores(model, weights, image, output, overwrite)


def _plot_scores(
    name: str,
    weights: Path | None,
    image: Path | None,
    output: Path,
    overwrite: bool,
    *,
    head: Any = None,
    stages: list[int] | None = None,
) -> None:
    from interlayer import analysis
    from interlayer.experiments import load_network

    from ..display import log_to_stderr

    log_to_stderr()
    check_output(output, overwrite)
    loaded = load_network(name, weights=weights, untrained=True)
    images = open_images(loaded, [image] if image else None).inputs
    found = analysis.layer_scores(loaded.network, images)
    for number in stages or ():
        if not 1 <= number <= len(found):
            raise ValueError(f"--stage must be from 1 to {len(found)}, got {number}")
    shown_stages = [found[number - 1] for number in sorted(set(stages))] if stages else found
    measured = analysis.contribution(loaded.network, images)
    shown = "1 image" if len(images) == 1 else f"{len(images)} images"
    note = f"{measured.change} ({shown})" if len(images) == 1 else f"{measured.change}; {measured.sentence} ({shown})"
    title = f"Which layer reads which: {loaded.title}" + (f", head {head}" if isinstance(head, int) else "")
    figure = analysis.plot_layer_scores(shown_stages, head=head, title=title, note=note)
    typer.echo(note)
    save(figure, output)
