"""`interlayer predict`: predict the classes of images, or their objects, with a trained network."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from .evaluate import AsJson, OtherWeights, RunOrModel, SkipBad

PREDICTIONS = "predictions"  # the default output folder
STDIN = "-"


def predict(
    network: RunOrModel,
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGE... [KEY=VALUE]...",
            help="Image files, folders of images, or - for an image on standard input; and for a model weights=FILE or "
            "pretrained=true, image_size=288.",
        ),
    ],
    top: Annotated[int, typer.Option(min=1, help="Number of classes to print for each image.")] = 3,
    weights: OtherWeights = None,
    as_json: AsJson = False,
    skip_bad: SkipBad = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for pictures of boxes, masks or label maps, and for results.json with COCO's results. "
            f"By default {PREDICTIONS}/ if the network predicts any of these."
        ),
    ] = None,
    min_score: Annotated[
        float, typer.Option(min=0, max=1, help="Lowest score of an object that is drawn. results.json has all objects.")
    ] = 0.5,
    annotations: Annotated[
        Path | None, typer.Option(help="COCO file of the images, whose ids of images and categories results.json uses.")
    ] = None,
) -> None:
    """Predict the most likely classes of image files, with the network of a run or with any model and its weights.

    A network that detects objects or labels pixels writes pictures of them and COCO's results into a folder.

    Example: `interlayer predict runs/20250101-120000-resnet50 photo.jpg holiday/ --top 5 --json`

    Example: `interlayer predict resnet50 photo.jpg pretrained=true`

    Example: `interlayer predict runs/cells smear.jpg --output found --min-score 0.7`
    """
    from rich.console import Console

    from interlayer.experiments import PredictionFolder, image_files, load_network
    from interlayer.experiments import predict as predict_images
    from interlayer.training.data.images import EncodedImage

    from .display import log_to_stderr, showing
    from .printing import rich_table

    log_to_stderr()
    overrides = [text for text in images if "=" in text and not Path(text).exists()]
    paths = [Path(text) for text in images if text not in (*overrides, STDIN)]
    if not paths and STDIN not in images:
        raise ValueError("no image to predict: name image files or folders of images")
    loaded = load_network(network, overrides, weights=weights)
    files: list[Path | EncodedImage] = [*image_files(paths)]
    if STDIN in images:
        files.append(EncodedImage("stdin", sys.stdin.buffer.read()))
    folder = None
    if loaded.task.draws or output or annotations:
        folder = PredictionFolder(output or Path(PREDICTIONS), loaded.task, files, annotations=annotations)
    on_bad_image = "skip" if skip_bad else "fail"
    with showing() as show:
        predictions = predict_images(
            loaded, files, top=top, on_bad_image=on_bad_image, skip_option="--skip-bad", show=show
        )
    if folder is not None:
        folder.write(predictions, min_score=min_score)
    if as_json:
        typer.echo(json.dumps(predictions, indent=2))
        return
    table = rich_table(loaded.task.show_predictions(predictions))
    Console(width=None if Console().is_terminal else 140).print(table)
    if folder is not None:
        typer.echo(f"{len(predictions)} pictures and COCO's results.json: {folder.folder}")
