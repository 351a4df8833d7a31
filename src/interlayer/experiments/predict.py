"""Predictions of a network for image files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torchvision.datasets.folder import IMG_EXTENSIONS

from ..training import Progress, TrainingError
from ..training.data import LoadingContext, Problems, Ranks
from ..training.data.images import EncodedImage, FileImages
from ..training.data.splits import files_under, is_image
from ..training.data.workers import LoadedEvalBatches
from .trained import LoadedNetwork

BATCH_SIZE = 64
DRAWN_BATCH_SIZE = 2  # of tasks that draw, whose images are large and whose masks take much memory


def image_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the files among ``paths``, and the images in the folders among them."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = [Path(file) for file in files_under(path) if is_image(file)]
            if not inside:
                raise TrainingError(f"{path} holds no images ({', '.join(IMG_EXTENSIONS)})")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise TrainingError(f"{path}: no such file or folder")
    return files


def predict(
    trained: LoadedNetwork,
    files: Sequence[Path | EncodedImage],
    *,
    top: int = 3,
    on_bad_image: str = "fail",
    skip_option: str = 'on_bad_image="skip"',
    show: Callable[[Progress], None] = lambda progress: None,
) -> list[dict[str, Any]]:
    """Returns the prediction for each file, in the order of the files.

    Args:
        trained: the network.
        files: the image files, or their contents.
        top: the number of answers per image, if the task ranks several.
        on_bad_image: whether files that are not images raise an error ("fail") or are skipped ("skip").
        skip_option: the option that skips such files, for the message of an error.
        show: called with the progress.

    Returns:
        The task's prediction for each image as JSON-serializable values, with the name of the file as ``image``.
    """
    images, problems = FileImages(files), Problems(on_bad_image, skip_option=skip_option)
    context = LoadingContext(trained.recipe, trained.task, trained.transform, Ranks(), trained.device, problems)
    batch_size = DRAWN_BATCH_SIZE if trained.task.draws else BATCH_SIZE
    workers = min(trained.recipe.workers, len(files) // BATCH_SIZE)
    found: dict[int, dict[str, Any]] = {}
    for pixels, targets, places in LoadedEvalBatches(images, batch_size, context, workers=workers):
        with torch.no_grad():
            outputs = trained.task.forward(trained.network, trained.batch_transform.normalize(pixels), targets)
        described = trained.task.predictions(outputs, top, targets)
        for place, description in zip(places.tolist(), described, strict=True):
            if place >= 0:  # the last batch is padded
                found[place] = {"image": images.name(place), **description}
        show(Progress(Path("predicting"), "predicting", 0, 1, len(found), len(files)))
    return [found[place] for place in sorted(found)]
