"""`interlayer evaluate`: evaluate a trained network on a set of images."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .train import DataName


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    data: DataName = None,
    weights: Annotated[
        Path | None, typer.Option(help="Other weights of the same network; by default the weights that the run tested.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate a trained network: metrics and loss, and for a classifier also calibration and the accuracy per class.

    Example: `interlayer evaluate runs/20250101-120000-resnet50 --data /data/imagenet`
    """
    from rich.console import Console

    from interlayer.experiments import TrainedNetwork
    from interlayer.experiments import evaluate as evaluate_network

    from .display import log_to_stderr, showing
    from .printing import rich_table

    log_to_stderr()
    trained = TrainedNetwork(run, weights)
    with showing() as show:
        scores = evaluate_network(trained, data, show=show)
    if as_json:
        typer.echo(json.dumps(scores, indent=2))
        return
    console = Console()
    for table in trained.task.show_details(scores):
        console.print(rich_table(table))
    if scores["contribution"] is not None:
        console.print(f"{trained.recipe.model}: {scores['contribution']['sentence']}", highlight=False)
