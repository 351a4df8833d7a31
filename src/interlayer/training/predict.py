"""A finished run as a network to use: on a set of images with labels, or on image files."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torchvision.datasets.folder import IMG_EXTENSIONS

from ..models import load_weights
from ..tasks import Scores, make_task
from .data import BatchTransform, Data, Images, ImageTransform, LoadingContext, Problems, Ranks, eval_batches, open_data
from .data.folders import FolderImages
from .data.images import FileImages
from .data.workers import LoadedEvalBatches
from .evaluation import evaluate_batches
from .files import TrainingError
from .recipe import Recipe, read_recipe
from .setup import build_network
from .summary import read_summary
from .trainer import Progress

BATCH = 64
PARTS = ("train", "val", "validation", "valid", "test", "cifar-10-batches-py", "cifar-100-python")
logger = logging.getLogger(__name__)


def _whole_folder(recipe: Recipe, classes: list[str]) -> Data | None:
    """A folder of class folders is evaluated whole: nothing of it need be kept for training."""
    path = Path(recipe.data)
    if not path.is_dir() or any((path / part).is_dir() for part in PARTS):
        return None
    problems = Problems(recipe.on_bad_image)
    images = FolderImages(path, classes, problems)
    return Data(images, None, images, classes, problems)


def image_files(paths: Sequence[Path]) -> list[Path]:
    """The files named, and those in the folders named."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMG_EXTENSIONS and p.is_file())
            if not inside:
                raise TrainingError(f"{path} holds no images ({', '.join(IMG_EXTENSIONS)})")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise TrainingError(f"{path}: no such file or folder")
    return files


class TrainedNetwork:
    """The network of a finished run, with the weights it was tested with.

    Args:
        folder: the run's folder.
        weights: other weights of the same network.
    """

    def __init__(self, folder: Path, weights: Path | None = None) -> None:
        if not (folder / "recipe.yaml").is_file():
            raise TrainingError(f"{folder} holds no run: expected the folder that `interlayer train` wrote")
        summary = read_summary(folder)
        self.recipe = read_recipe(folder / "recipe.yaml")
        self.classes: list[str] = summary["classes"]
        self.task = make_task(dataclasses.asdict(self.recipe.replace(pretrained=False, weights=None)), self.classes)
        self.network = build_network(self.task)
        load_weights(self.network, weights or folder / "weights.safetensors")
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.network.to(self.device).eval()
        self.transform = ImageTransform(
            summary["image_size"], tuple(summary["mean"]), tuple(summary["std"]), summary["interpolation"],
            summary["crop_pct"],
        )  # fmt: skip
        self.batch_transform = BatchTransform.of(self.recipe, self.task, summary["mean"], summary["std"], self.device)

    def evaluate(self, data: str | None = None, show: Callable[[Progress], None] = lambda p: None) -> dict[str, Any]:
        """Scores on the test images of the run's data, or of `data`: overall, by class, and how well calibrated."""
        recipe = self.recipe.replace(data=data or self.recipe.data, num_classes=len(self.classes), validation=0)
        opened = _whole_folder(recipe, self.classes) or open_data(recipe)
        for note in opened.notes:
            logger.warning(note)
        theirs = list(opened.test.classes)
        if isinstance(opened.test, Images) and theirs != self.classes[: len(theirs)]:
            found, known = ", ".join(theirs[:5]), ", ".join(self.classes[:5])
            raise TrainingError(f"{recipe.data} has other classes than the run: {found}, ... instead of {known}, ...")
        context = LoadingContext(recipe, self.task, self.transform, Ranks(), self.device, opened.problems)
        batches = eval_batches(opened.test, context)
        scores = self._scores(batches, show)
        return {
            "model": self.recipe.model,
            "data": recipe.data,
            "images": scores.count,
            **{metric.name: scores.metrics[metric.name] for metric in self.task.eval_metrics},
            "loss": scores.metrics["loss"],
            **self.task.details(scores),
            "bad_images": opened.problems.found,
        }

    def predict(
        self,
        files: Sequence[Path],
        top: int = 3,
        *,
        on_bad_image: str = "fail",
        show: Callable[[Progress], None] = lambda p: None,
    ) -> list[dict[str, Any]]:
        """The `top` most likely classes of each file, in the order of the files."""
        images, problems = FileImages(files), Problems(on_bad_image)
        workers = min(self.recipe.workers, len(files) // BATCH)
        context = LoadingContext(self.recipe, self.task, self.transform, Ranks(), self.device, problems)
        batches = LoadedEvalBatches(images, BATCH, context, workers=workers)
        found: dict[int, dict[str, Any]] = {}
        for pixels, _, places in batches:
            with torch.no_grad():
                probabilities = self.network(self.batch_transform.normalize(pixels)).float().softmax(1)
            best = probabilities.topk(min(top, len(self.classes)), dim=1)
            rows = zip(places.tolist(), best.values.tolist(), best.indices.tolist(), strict=True)
            for place, values, classes in rows:
                if place < 0:  # fills up the last batch
                    continue
                found[place] = {
                    "image": images.name(place),
                    "classes": [
                        {"class": self.classes[c], "probability": p} for c, p in zip(classes, values, strict=True)
                    ],
                }
            show(Progress(Path("predicting"), "predicting", 0, 1, len(found), len(files)))
        return [found[place] for place in sorted(found)]

    def _scores(self, batches: Any, show: Callable[[Progress], None]) -> Scores:
        scores = None
        normalize = self.batch_transform.normalize
        evaluation = evaluate_batches(self.task, self.network, batches, normalize=normalize, records=True)
        for done, evaluated in enumerate(evaluation):
            scores = evaluated
            show(Progress(Path("evaluating"), "evaluating", 0, 1, done, math.ceil(batches.count / BATCH)))
        assert scores is not None
        return scores
