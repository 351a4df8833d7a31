"""`interlayer predict`: the classes a trained network sees in images."""

import json
from pathlib import Path
from typing import Annotated

import typer


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files, or folders of them.")],
    top: Annotated[int, typer.Option(min=1, help="Classes to show for each image.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out files that are no images.")] = False,
) -> None:
    """Predict the most likely classes of image files.

    Example: `interlayer predict runs/20250101-120000-resnet50 photo.jpg holiday/ --top 5 --json`
    """
    from rich.console import Console
    from rich.table import Table

    from interlayer.training.predict import TrainedNetwork, image_files

    from .display import log_to_stderr, showing

    log_to_stderr()
    network = TrainedNetwork(run)
    with showing() as show:
        predictions = network.predict(image_files(images), top, on_bad_image="skip" if skip_bad else "fail", show=show)
    if as_json:
        typer.echo(json.dumps(predictions, indent=2))
        return
    table = Table("image", *(f"class {rank + 1}" for rank in range(min(top, len(network.classes)))))
    for entry in predictions:
        table.add_row(entry["image"], *(f"{p['class']} {p['probability']:.1%}" for p in entry["classes"]))
    Console(width=None if Console().is_terminal else 140).print(table)
