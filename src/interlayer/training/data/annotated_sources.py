"""Opens the splits of an annotated dataset, whose format is recognized by its files.

    FOLDER/ImageSets/Main/SPLIT.txt                                   Pascal VOC (voc.py)
    FOLDER/SPLIT.json and FOLDER/images/                              COCO (coco.py)
    FOLDER/annotations/instances_SPLIT2017.json, FOLDER/SPLIT2017/    COCO as it is distributed
    FOLDER/images/SPLIT/ and FOLDER/masks/SPLIT/                      mask PNGs (mask_folders.py)

The data options are `bad` (fail or skip: what happens to annotations that cannot be used), `masks` (whether masks are
read from COCO), and for label maps `classes` (the class names, or their number) and `ignore` (the numbers of pixels
that are not counted).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...tasks import task_class
from ..files import TrainingError
from ..recipe import Recipe
from ..wording import listing
from .annotated import AnnotatedImages, annotation_problems
from .coco import read_coco
from .dataset import Data
from .images import Images, Problems
from .mask_folders import IGNORED, LabelMaps, read_instances
from .splits import folders_in, split_of
from .voc import read_voc

EVALUATED = ("test", "validation", "train")  # the split that is evaluated: the first that exists
OBJECT_OPTIONS = ("bad", "masks")
LABEL_MAP_OPTIONS = ("bad", "classes", "ignore")
Reader = Callable[..., AnnotatedImages]


def open_annotated(recipe: Recipe) -> Data:
    """Opens the data of a recipe whose task has boxes, masks or label maps."""
    root, annotations = Path(recipe.data).expanduser(), task_class(recipe.task).annotations
    if annotations == "label_maps":
        return open_label_maps(root, recipe.data_options)
    data = open_objects(root, {"masks": annotations == "masks", **recipe.data_options})
    for images in (data.train, data.validation, data.test):
        _with_masks(root, images, annotations == "masks")
    return data


def open_annotated_to_evaluate(recipe: Recipe, classes: Sequence[str], split: str | None) -> Data:
    """Opens the images on which a network is evaluated, as the test split.

    Args:
        recipe: names the data and its task.
        classes: the classes of the network.
        split: train, validation or test; if None, the first that exists of test, validation and train.
    """
    root, annotations, options = (
        Path(recipe.data).expanduser(),
        task_class(recipe.task).annotations,
        recipe.data_options,
    )
    labeled = annotations == "label_maps"
    _check(root, options, LABEL_MAP_OPTIONS if labeled else OBJECT_OPTIONS)
    problems = annotation_problems(str(options.get("bad", "fail")))
    splits: Mapping[str, Any] = _image_folders(root) if labeled else _readers(root, masks=annotations == "masks")
    chosen = split or next((name for name in EVALUATED if name in splits), None)
    if chosen is None or chosen not in splits:
        raise TrainingError(f"{root} has no {chosen or 'annotated'} split: it holds {listing(list(splits)) or 'none'}")
    images: Images
    if labeled:
        folder = splits[chosen]
        images = LabelMaps(folder, root / "masks" / folder.name, classes, problems, ignore=_ignored(options))
    else:
        images = splits[chosen](problems, classes=list(classes), crowds=True, keep_empty=True)
        _with_masks(root, images, annotations == "masks")
    notes = [] if split else [f"evaluating the {chosen} split of {root}"]
    return Data(images, None, images, list(classes), problems, notes)


def _with_masks(root: Path, images: Any, wanted: bool) -> None:
    """Raises if there are no masks but they are wanted. Masks that are not wanted are not read."""
    if images is not None and wanted and not images.has_masks:
        raise TrainingError(f"{root} has boxes without masks: task=instances needs masks, task=detect does not")
    if images is not None:
        images.has_masks = wanted


def _readers(root: Path, *, masks: bool) -> dict[str, Reader]:
    return _voc(root) or _coco(root, masks=masks) or _instances(root)


def open_objects(root: Path, options: Mapping[str, Any]) -> Data:
    """Opens a dataset of objects for training.

    Validation and test images keep images without objects and crowds, as COCO's metrics require.

    Args:
        root: the folder.
        options: the data options.
    """
    _check(root, options, OBJECT_OPTIONS)
    problems = annotation_problems(str(options.get("bad", "fail")))
    readers = _readers(root, masks=bool(options.get("masks", False)))
    if not readers:
        raise TrainingError(
            f"{root} holds no annotated images: expected ImageSets/Main/train.txt (Pascal VOC), train.json or "
            f"annotations/instances_train.json (COCO), or images/train and masks/train"
        )
    train = _training(root, readers)(problems)
    held_out: dict[str, Images] = {
        split: reader(problems, classes=train.classes, crowds=True, keep_empty=True)
        for split, reader in readers.items()
        if split != "train"
    }
    return _data(root, train, held_out, problems)


def open_label_maps(root: Path, options: Mapping[str, Any]) -> Data:
    """Opens a dataset of label maps for training.

    Args:
        root: the folder.
        options: the data options. Without `classes`, the names are the lines of FOLDER/classes.txt.
    """
    _check(root, options, LABEL_MAP_OPTIONS)
    problems = annotation_problems(str(options.get("bad", "fail")))
    classes, ignored = _class_names(root, options.get("classes")), _ignored(options)
    folders = _image_folders(root)
    _training(root, folders)
    splits = {
        split: LabelMaps(folder, root / "masks" / folder.name, classes, problems, ignore=ignored)
        for split, folder in folders.items()
    }
    return _data(root, splits.pop("train"), splits, problems)


def _ignored(options: Mapping[str, Any]) -> list[int]:
    """Returns the numbers of pixels that are not counted."""
    ignore = options.get("ignore", IGNORED)
    ignored = [int(number) for number in (ignore if isinstance(ignore, Sequence) else [ignore])]
    if not all(0 <= number < 2**16 for number in ignored):
        raise TrainingError(f"data_options.ignore={ignore}: expected numbers of pixels from 0 to {2**16 - 1}")
    return ignored


def _check(root: Path, options: Mapping[str, Any], valid: Sequence[str]) -> None:
    if not root.is_dir():
        raise TrainingError(f"{root}: no such folder")
    for key in options:
        if key not in valid:
            raise TrainingError(f"{root} has no data option {key!r}: {', '.join(valid)}")


def _training(root: Path, splits: Mapping[str, Any]) -> Any:
    if "train" not in splits:
        raise TrainingError(f"{root} has no training images: it holds {listing(list(splits)) or 'no splits'}")
    return splits["train"]


def _data(root: Path, train: Images, held_out: Mapping[str, Images], problems: Problems) -> Data:
    """Returns the splits. If there is only one held-out split, it is the test split."""
    if not held_out:
        raise TrainingError(f"{root} has neither validation nor test images")
    test = held_out.get("test") or held_out["validation"]
    validation = held_out.get("validation") if "test" in held_out else None
    return Data(train, validation, test, list(train.classes), problems)


def _named(names: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """Returns the values by split, given their names, such as train and val2017. Other names are ignored."""
    found: dict[str, Any] = {}
    for name, value in sorted(names.items()):
        split = split_of(name)
        if split in found:
            raise TrainingError(f"{root} has two {split} splits: {found[split]} and {value}; remove one of them")
        if split is not None:
            found[split] = value
    return found


def _voc(root: Path) -> dict[str, Reader]:
    lists = {path.stem: path.stem for path in (root / "ImageSets" / "Main").glob("*.txt")}
    return {split: partial(read_voc, root, name) for split, name in _named(lists, root).items()}


def _coco(root: Path, *, masks: bool) -> dict[str, Reader]:
    files = [*root.glob("*.json"), *(root / "annotations").glob("instances_*.json")]
    named = _named({path.stem.removeprefix("instances_"): path for path in files}, root)
    return {split: partial(read_coco, path, _images_of(root, path), masks=masks) for split, path in named.items()}


def _images_of(root: Path, file: Path) -> Path:
    """Returns the folder of the images of a COCO file: named as its split, in FOLDER or FOLDER/images, or images."""
    name = file.stem.removeprefix("instances_")
    folders = [root / name, root / "images" / name, root / "images"]
    return next((folder for folder in folders if folder.is_dir()), root)


def _image_folders(root: Path) -> dict[str, Path]:
    images = root / "images"
    return _named({folder.name: folder for folder in folders_in(images)}, root) if images.is_dir() else {}


def _instances(root: Path) -> dict[str, Reader]:
    if not (root / "masks").is_dir():
        return {}
    return {
        split: partial(_read_instances, folder, root / "masks" / folder.name)
        for split, folder in _image_folders(root).items()
    }


def _read_instances(
    images: Path, masks: Path, problems: Problems, *, crowds: bool = False, **options: Any
) -> AnnotatedImages:
    return read_instances(images, masks, problems, **options)  # mask PNGs have no crowds


def _class_names(root: Path, given: Any) -> list[str]:
    if isinstance(given, (int, float)):
        return [str(label) for label in range(int(given))]
    if isinstance(given, Sequence) and not isinstance(given, str):
        return [str(name) for name in given]
    file = root / "classes.txt"
    if given is not None or not file.is_file():
        raise TrainingError(
            f"the classes of {root} are unknown: give their names or their number as data_options.classes, or write "
            f"one name a line to {file}"
        )
    return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
