"""`interlayer evaluate`: evaluate a network on a set of images."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .train import DataName

RunOrModel = Annotated[
    str,
    typer.Argument(metavar="RUN|MODEL", help="Folder of a finished run, or a network such as NAME or NAME+MECHANISM."),
]
OtherWeights = Annotated[
    Path | None, typer.Option(help="Weights file; by default the weights that the run tested. Also weights=FILE.")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Skip files that are not images.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def evaluate(
    network: RunOrModel,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="weights=FILE or pretrained=true for a model, and the transform of the images: image_size=288 "
            "crop_pct=1.0. Also workers=8 device=cpu.",
        ),
    ] = None,
    data: DataName = None,
    split: Annotated[
        str | None,
        typer.Option(help="train, validation or test. By default the first that exists: test, validation, train."),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            help="Right labels of ImageNet's validation images: real for those of ImageNet-ReaL, or a JSON file."
        ),
    ] = None,
    restrict: Annotated[
        bool | None,
        typer.Option(
            "--restrict/--no-restrict",
            help="Restrict predictions to the classes that have a folder. By default only for ImageNet-A and -R.",
        ),
    ] = None,
    weights: OtherWeights = None,
    skip_bad: SkipBad = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a network: metrics and loss, and for a classifier also calibration and the accuracy per class.

    The network of a run is evaluated on the test images of the run, or on --data. A model needs --data and its weights;
    the classes of ImageNet are known, so that a folder of WordNet ids or of class names can be evaluated. Class folders
    are matched with the classes of the network by name.

    Example: `interlayer evaluate runs/20250101-120000-resnet50 --data /data/imagenet`

    The folders of ImageNet-V2, ImageNet-A and ImageNet-R are evaluated as they are. With --labels real, the validation
    images of ImageNet are ImageNet-ReaL.

    Example: `interlayer evaluate resnet50+mrla_light weights=resnet50.safetensors --data /data/imagenet/val`

    Example: `interlayer evaluate resnet50 pretrained=true --data /data/imagenet/val --labels real`
    """
    from rich.console import Console

    from interlayer.experiments import evaluate as evaluate_network
    from interlayer.experiments import load_network

    from .display import log_to_stderr, showing
    from .printing import rich_table

    log_to_stderr()
    skipping = ["on_bad_image=skip"] if skip_bad else []
    loaded = load_network(network, [*(overrides or []), *skipping], weights=weights)
    with showing() as show:
        scores = evaluate_network(
            loaded, data, split=split, labels=labels, restrict=restrict, skip_option="--skip-bad", show=show
        )
    if as_json:
        typer.echo(json.dumps(scores, indent=2))
        return
    console = Console()
    for table in loaded.task.show_details(scores):
        console.print(rich_table(table))
    if scores["contribution"] is not None:
        console.print(f"{loaded.recipe.model}: {scores['contribution']['sentence']}", highlight=False)
