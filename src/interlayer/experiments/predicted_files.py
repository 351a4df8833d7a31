"""The output folder of predictions: pictures, COCO's results, and the ids of their images and classes."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from ..tasks import Task
from ..tasks.coco_results import CocoIds
from ..training import TrainingError
from ..training.data.images import EncodedImage, FileImages
from ..training.files import make_folder, write_bytes, write_json

RESULTS_FILE = "results.json"
IMAGES_FILE = "images.json"


class PredictionFolder:
    """Writes the predictions for image files into a folder.

    It holds a picture NAME.jpg for each image, results.json (COCO's results) and images.json (a COCO file with the
    ids of the images and the classes, and without annotations). Everything that can be wrong is checked at once, before
    the network runs.

    Args:
        folder: the output folder. Files of the same names are replaced.
        task: the task of the network.
        files: the image files.
        annotations: the COCO file of the dataset whose ids of images and classes are used; if None, both count from 1.

    Raises:
        TrainingError: if a picture would replace one of the images.
        TaskError: if the task draws no pictures, or an image or a class is not in ``annotations``.
    """

    def __init__(
        self, folder: Path, task: Task, files: Sequence[Path | EncodedImage], *, annotations: Path | None = None
    ) -> None:
        if not task.draws:
            raise TrainingError(f"task={task.name} draws no predictions: leave --output out")
        self.folder, self.task, self.images = folder, task, FileImages(files)
        names = [str(file) for file in files]
        self.pictures = dict(zip(names, _pictures(folder, names), strict=True))
        originals = {Path(name).resolve() for name in names}
        for path in self.pictures.values():
            if path.resolve() in originals:
                raise TrainingError(f"{path} is one of the images, and a picture would replace it: give another folder")
        classes = task.classes
        self.ids = CocoIds.read(annotations, names, classes) if annotations else CocoIds.numbered(names, classes)

    def write(self, predictions: Sequence[Mapping[str, Any]], *, min_score: float) -> None:
        """Writes the pictures and the JSON files.

        Args:
            predictions: what `predict` returned.
            min_score: objects of a lower score are not drawn. COCO's results have all of them.
        """
        make_folder(self.folder)
        index = {self.images.name(place): place for place in range(len(self.images))}
        entries, results = [], []
        for prediction in predictions:
            name = prediction["image"]
            image = self.images.open(index[name])
            _save(self.pictures[name], self.task.draw(image, prediction, min_score=min_score))
            number = self.ids.images[name]
            entries.append({"id": number, "file_name": name, "width": image.width, "height": image.height})
            results += self.task.coco_results(prediction, number, self.ids.categories)
        categories = [{"id": number, "name": name} for name, number in self.ids.categories.items()]
        content = {"images": entries, "annotations": [], "categories": categories}
        write_json(self.folder / IMAGES_FILE, content)
        write_json(self.folder / RESULTS_FILE, results)


def _pictures(folder: Path, names: Sequence[str]) -> list[Path]:
    """Returns a file for each picture: the name of its image, with a number if several images have this name."""
    seen = Counter[str]()
    files = []
    for name in names:
        stem = Path(name).stem
        seen[stem] += 1
        files.append(folder / (f"{stem}.jpg" if seen[stem] == 1 else f"{stem}_{seen[stem]}.jpg"))
    if len(set(files)) < len(files):  # such as a.png, a.jpg and a_2.png
        files = [folder / f"{number}_{Path(name).stem}.jpg" for number, name in enumerate(names, start=1)]
    return files


def _save(path: Path, picture: Image.Image) -> None:
    """Writes a picture atomically."""
    content = io.BytesIO()
    picture.save(content, "JPEG", quality=92, subsampling=0)  # sharp edges of colored lines and letters
    write_bytes(path, content.getvalue())
