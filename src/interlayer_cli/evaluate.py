"""`interlayer evaluate`: how well trained weights do on a set of images."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .train import DataName


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    data: DataName = None,
    weights: Annotated[
        Path | None, typer.Option(help="Weights of the same network; those the run tested unless given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate a trained network: top-1, top-5, loss, calibration, and each class by itself.

    Example: `interlayer evaluate runs/20250101-120000-resnet50 --data /data/imagenet`
    """
    from rich.console import Console
    from rich.table import Table

    from interlayer.training.predict import TrainedNetwork

    from .display import log_to_stderr, showing

    log_to_stderr()
    with showing() as show:
        scores = TrainedNetwork(run, weights).evaluate(data, show)
    if as_json:
        typer.echo(json.dumps(scores, indent=2))
        return
    console = Console()
    whole = Table(
        "images", "top 1", "top 5", "loss", "calibration error", title=f"{scores['model']} on {scores['data']}"
    )
    whole.add_row(
        f"{scores['images']:,}", f"{scores['accuracy']:.2%}", f"{scores['top5']:.2%}", f"{scores['loss']:.4f}",
        f"{scores['calibration_error']:.4f}",
    )  # fmt: skip
    console.print(whole)
    classes = Table("class", "images", "accuracy", "most often taken for")
    for entry in scores["classes"]:
        classes.add_row(
            entry["class"], f"{entry['images']:,}", f"{entry['accuracy']:.2%}" if entry["images"] else "",
            f"{entry['taken_for']} ({entry['taken_for_images']})" if entry["taken_for"] else "",
        )  # fmt: skip
    console.print(classes)
