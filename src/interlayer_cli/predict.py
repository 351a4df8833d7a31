"""`interlayer predict`: predict the classes of images with a trained network."""

import json
from pathlib import Path
from typing import Annotated

import typer


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files, or folders of images.")],
    top: Annotated[int, typer.Option(min=1, help="Number of classes to print for each image.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip files that are not images.")] = False,
) -> None:
    """Predict the most likely classes of image files.

    Example: `interlayer predict runs/20250101-120000-resnet50 photo.jpg holiday/ --top 5 --json`
    """
    from rich.console import Console

    from interlayer.experiments import TrainedNetwork, image_files
    from interlayer.experiments import predict as predict_images

    from .display import log_to_stderr, showing
    from .printing import rich_table

    log_to_stderr()
    trained, on_bad_image = TrainedNetwork(run), "skip" if skip_bad else "fail"
    with showing() as show:
        predictions = predict_images(trained, image_files(images), top=top, on_bad_image=on_bad_image, show=show)
    if as_json:
        typer.echo(json.dumps(predictions, indent=2))
        return
    table = rich_table(trained.task.show_predictions(predictions))
    Console(width=None if Console().is_terminal else 140).print(table)
