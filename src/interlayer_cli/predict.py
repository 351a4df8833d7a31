"""`interlayer predict`: predict the classes of images with a trained network."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .evaluate import AsJson, OtherWeights, RunOrModel, SkipBad


def predict(
    network: RunOrModel,
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGE... [KEY=VALUE]...",
            help="Image files, or folders of images; and for a model weights=FILE or pretrained=true, image_size=288.",
        ),
    ],
    top: Annotated[int, typer.Option(min=1, help="Number of classes to print for each image.")] = 3,
    weights: OtherWeights = None,
    as_json: AsJson = False,
    skip_bad: SkipBad = False,
) -> None:
    """Predict the most likely classes of image files, with the network of a run or with any model and its weights.

    Example: `interlayer predict runs/20250101-120000-resnet50 photo.jpg holiday/ --top 5 --json`

    Example: `interlayer predict resnet50 photo.jpg pretrained=true`
    """
    from rich.console import Console

    from interlayer.experiments import image_files, load_network
    from interlayer.experiments import predict as predict_images

    from .display import log_to_stderr, showing
    from .printing import rich_table

    log_to_stderr()
    overrides = [text for text in images if "=" in text and not Path(text).exists()]
    paths = [Path(text) for text in images if text not in overrides]
    if not paths:
        raise ValueError("no image to predict: name image files or folders of images")
    loaded = load_network(network, overrides, weights=weights)
    on_bad_image = "skip" if skip_bad else "fail"
    with showing() as show:
        predictions = predict_images(
            loaded, image_files(paths), top=top, on_bad_image=on_bad_image, skip_option="--skip-bad", show=show
        )
    if as_json:
        typer.echo(json.dumps(predictions, indent=2))
        return
    table = rich_table(loaded.task.show_predictions(predictions))
    Console(width=None if Console().is_terminal else 140).print(table)
