"""ImageNet-V2, ImageNet-A, ImageNet-R and ImageNet-ReaL are evaluated from folders named as these test sets name them.

The images are real photographs, package data of matplotlib and scikit-learn.
"""

import json
import logging
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from matplotlib import cbook
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.data import ImageNetInfo
from torchvision.transforms.functional import pil_to_tensor

from interlayer.experiments import evaluate, load_network
from interlayer.tasks.classification import ClassificationEvaluator
from interlayer.tasks.evaluator import Collective
from interlayer.training import TrainingError
from interlayer.training.data import ClassNames
from interlayer.training.data.relabeled import read_right_labels

MODEL = "test_resnet"
OPTIONS = ("image_size=32", "device=cpu", "workers=0")
SYNSETS = list(ImageNetInfo().label_names())


def timm_synsets(file: str) -> list[str]:
    return resources.files("timm.data").joinpath("_info", file).read_text().split()


@pytest.fixture(scope="module")
def photographs() -> list[Image.Image]:
    images = [Image.fromarray(array) for array in load_sample_images().images]
    images.append(Image.open(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)).convert("RGB"))
    return [image.resize((96, 80)) for image in images]


@pytest.fixture(scope="module")
def weights(photographs, tmp_path_factory) -> Path:
    """Random weights of a network. Its bias removes what the photographs share, so that predictions differ."""
    torch.manual_seed(1)
    network = timm.create_model(MODEL).eval()
    pixels = torch.stack([pil_to_tensor(image.resize((32, 32))) for image in photographs]) / 127.5 - 1
    with torch.no_grad():
        network.fc.bias.sub_(network(pixels).mean(0))
        network.fc.weight.mul_(30)
        network.fc.bias.mul_(30)
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    safetensors.torch.save_file(network.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def loaded(weights):
    return load_network(MODEL, [f"weights={weights}", *OPTIONS])


def logits_of(loaded, files: list[Path]) -> torch.Tensor:
    with torch.no_grad():
        return loaded.network(torch.stack([loaded.transform(Image.open(file)) for file in files]))


def save(image: Image.Image, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, "JPEG")
    return path


def test_the_numbered_folders_of_imagenet_v2_are_class_numbers(loaded, photographs, tmp_path, caplog):
    """Sorted as text, "10" comes before "2": labels by order would all be wrong."""
    numbers = [0, 2, 10, 281, 999]
    files = [save(photographs[i % 3], tmp_path / str(number) / "a.jpeg") for i, number in enumerate(numbers)]
    scores = evaluate(loaded, str(tmp_path))
    expected = F.cross_entropy(logits_of(loaded, files), torch.tensor(numbers))
    assert scores["loss"] == pytest.approx(float(expected), rel=1e-4)
    assert [label for label, entry in enumerate(scores["classes"]) if entry["images"]] == numbers
    assert scores["candidate_classes"] == 1000
    assert "are the numbers of ImageNet's classes" in caplog.text


def test_a_run_on_imagenets_folders_is_evaluated_on_imagenet_v2():
    """A run knows its classes as WordNet ids only."""
    names = ClassNames.of(SYNSETS)
    assert names.names == SYNSETS
    assert names.match(["0", "10", "999"]) == {"0": 0, "10": 10, "999": 999}
    assert names.match(["tench", "n02123045"]) == {"tench": 0, "n02123045": 281}
    assert not ClassNames.of([str(number) for number in range(1000)]).is_imagenet_1k
    assert ClassNames.of(SYNSETS[:100]).match(["0", "1"]) == {}, "numbers of 100 of the classes are ambiguous"


def test_numbers_of_other_imagenets_are_not_guessed():
    """ImageNet-V2's numbers are those of ImageNet-1k, and not the classes of a network for ImageNet-21k."""
    head = torch.nn.Linear(1, 1)
    head.num_classes = 21843
    assert ClassNames.imagenet(head).match(["0", "1"]) == {}


@pytest.mark.parametrize(
    ("name", "file"), [("ImageNet-A", "imagenet_a_synsets.txt"), ("ImageNet-R", "imagenet_r_synsets.txt")]
)
def test_predictions_are_restricted_to_the_classes_of_imagenet_a_and_r(
    name, file, loaded, photographs, tmp_path, caplog
):
    synsets = timm_synsets(file)
    files = [save(photographs[i % 3], tmp_path / synset / "b.jpg") for i, synset in enumerate(synsets)]
    labels = torch.tensor([SYNSETS.index(synset) for synset in synsets])
    scores = evaluate(loaded, str(tmp_path))
    kept = logits_of(loaded, files)[:, labels]  # as the authors' programs: the logits of these 200 classes alone
    ranks = torch.arange(200)
    assert scores["loss"] == pytest.approx(float(F.cross_entropy(kept, ranks)), rel=1e-4)
    assert len(set(kept.argmax(1).tolist())) == 3, "each photograph has its own prediction"
    assert scores["accuracy"] == pytest.approx(float((kept.argmax(1) == ranks).float().mean()))
    assert scores["top5"] == pytest.approx(float((kept.topk(5).indices == ranks[:, None]).any(1).float().mean()))
    assert f"200 of the 1,000 classes have a folder in {tmp_path}, those of {name}: predictions are" in caplog.text
    assert scores["candidate_classes"] == 200
    title = loaded.task.show_details(scores)[0].title
    assert title.endswith("predictions among 200 of 1,000 classes")
    free = evaluate(loaded, str(tmp_path), restrict=False)
    assert (free["candidate_classes"], free["loss"] > scores["loss"]) == (1000, True)


def test_other_subsets_are_restricted_if_asked_for(loaded, photographs, tmp_path, caplog):
    """A few class folders of one's own are no reason to make the network's task easier."""
    files = [save(photographs[i], tmp_path / SYNSETS[i] / "c.jpg") for i in range(3)]
    free, restricted = evaluate(loaded, str(tmp_path)), evaluate(loaded, str(tmp_path), restrict=True)
    kept = logits_of(loaded, files)[:, :3]
    assert restricted["loss"] == pytest.approx(float(F.cross_entropy(kept, torch.arange(3))), rel=1e-4)
    assert "top5" in free
    assert "top5" not in restricted, "of three classes, top 5 is always right"
    assert "predictions are among all 1,000, unless restricted by --restrict" in caplog.text


def test_a_restriction_that_would_change_nothing_is_named(loaded, photographs, tmp_path, caplog):
    """Otherwise it would seem to have been done."""
    with pytest.raises(TrainingError, match="the data has no folders that are matched with classes: leave it out"):
        evaluate(load_network(MODEL, [f"weights={small_weights(tmp_path, 10)}", *OPTIONS]), "digits", restrict=True)
    for synset in SYNSETS:
        save(photographs[0].resize((8, 8)), tmp_path / "all" / synset / "a.jpg")
    scores = evaluate(loaded, str(tmp_path / "all"), restrict=True)
    assert scores["candidate_classes"] == 1000
    assert "all classes have a folder: there is nothing to restrict" in caplog.text


def small_weights(folder: Path, classes: int) -> Path:
    path = folder / "small.safetensors"
    safetensors.torch.save_file(timm.create_model(MODEL, num_classes=classes).state_dict(), path)
    return path


def test_classes_of_other_data_are_not_taken_for_imagenets_numbers(loaded):
    """The classes of the digits are named 0 to 9, and are not tench to ostrich."""
    with pytest.raises(TrainingError, match="digits has other classes than the network"):
        evaluate(loaded, "digits")


def test_restricted_predictions_also_count_for_the_contribution(weights, photographs, tmp_path):
    """Otherwise the network with and without its mechanism would be compared on different tasks."""
    for i in range(3):
        save(photographs[i], tmp_path / SYNSETS[i] / "d.jpg")
    name = f"{MODEL}+mrla_light:channels_per_head=8"
    attached = load_network(name, [f"weights={weights}", *OPTIONS])
    scores = evaluate(attached, str(tmp_path), restrict=True)
    assert scores["contribution"]["changed"] == 0
    assert scores["contribution"]["value_without"] == scores["accuracy"] > evaluate(attached, str(tmp_path))["accuracy"]


def validation_file(root: Path, number: int, folder: str = "") -> Path:
    return root / folder / f"ILSVRC2012_val_{number:08d}.JPEG"


@pytest.mark.parametrize("class_folders", [True, False])
def test_any_right_label_of_imagenet_real_counts(class_folders, loaded, photographs, tmp_path, caplog):
    """Labels come from the names of the images, in class folders or without. Images without a label are left out."""
    numbers = [1, 2, 5, 8]  # the first has no right label, the second and the third have two
    files = [
        save(photographs[i % 3], validation_file(tmp_path, number, SYNSETS[i] if class_folders else ""))
        for i, number in enumerate(numbers)
    ]
    scores = evaluate(loaded, str(tmp_path), labels="real")
    right = [read_right_labels("real")[number - 1] for number in numbers]
    assert (right[0], sorted(right[1])) == ([], [795, 970])
    probabilities = logits_of(loaded, files).double().softmax(1)
    losses = [-float(p[labels].sum().log()) for p, labels in zip(probabilities[1:], right[1:], strict=True)]
    assert scores["images"] == 3
    assert scores["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert "3 images have right labels in ImageNet-ReaL, and any of them counts" in caplog.text
    assert "1 of 4 images have no right label and are left out" in caplog.text


def test_the_folder_of_the_validation_images_is_found_or_given(loaded, photographs, weights, tmp_path, caplog):
    for name in ("val", "renamed"):
        save(photographs[0], validation_file(tmp_path, 2, name))
    save(photographs[0], validation_file(tmp_path, 3, "renamed"))
    assert evaluate(loaded, str(tmp_path), labels="real")["images"] == 1
    assert f"evaluating {tmp_path / 'val'}" in caplog.text
    given = load_network(MODEL, [f"weights={weights}", *OPTIONS, "data_options.validation_split=renamed"])
    scores = evaluate(given, str(tmp_path), labels="real")
    assert (scores["images"], scores["labels"]) == (2, "real")
    assert ", labels=real" in loaded.task.show_details(scores)[0].title
    with pytest.raises(TrainingError, match="has no test split: it holds renamed, val"):
        evaluate(loaded, str(tmp_path), labels="real", split="test")
    save(photographs[0], validation_file(tmp_path, 4, "valid"))
    with pytest.raises(TrainingError, match="holds val/ and valid/: give one as --data"):
        evaluate(loaded, str(tmp_path), labels="real")


def test_labels_of_ones_own_file_are_counted_once_each(loaded, photographs, tmp_path):
    """With the predicted class among the labels of every image but one, accuracy is the share of the others."""
    files = [save(photographs[i], validation_file(tmp_path / "val", i + 1)) for i in range(3)]
    logits = logits_of(loaded, files)
    best = logits.argmax(1).tolist()
    right = [
        [0, best[0]],
        [best[1], best[1]],
        [label for label in (0, 1, 2) if label != best[2]],
        *([] for _ in range(49_997)),
    ]
    (tmp_path / "mine.json").write_text(json.dumps(right))
    scores = evaluate(loaded, str(tmp_path), labels=str(tmp_path / "mine.json"))
    assert (scores["images"], scores["accuracy"]) == (3, pytest.approx(2 / 3))
    losses = [-p[sorted(set(labels))].sum().log() for p, labels in zip(logits.double().softmax(1), right, strict=False)]
    assert scores["loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4), "a repeated label counts once"
    counted = {entry["class"]: (entry["images"], entry["accuracy"]) for entry in scores["classes"] if entry["images"]}
    assert sum(images for images, _ in counted.values()) == 3
    assert sum(images * accuracy for images, accuracy in counted.values()) == pytest.approx(2)


def test_one_label_of_several_gives_the_scores_of_plain_labels():
    torch.manual_seed(0)
    logits, labels = torch.randn(20, 7), torch.randint(7, (20,))
    padded = torch.stack([labels, torch.full_like(labels, -1)], dim=1)
    results = []
    for targets in (labels, padded):
        evaluator = ClassificationEvaluator(records=True)
        evaluator.update(logits, targets, torch.arange(20))
        results.append(evaluator.result(Collective()))
    assert results[0].metrics == pytest.approx(results[1].metrics)
    assert torch.equal(results[0].records["predictions"], results[1].records["predictions"])


def entries(count: int = 50_000, first: object = None) -> list[object]:
    return [[3] if first is None else first, *([] for _ in range(count - 1))]


@pytest.mark.parametrize(
    ("folder", "content", "message"),
    [
        ("1000", None, "the class folder 1000 is no class number of ImageNet-1k: expected 0 to 999"),
        ("extra", None, "extra cannot be used: its class 'extra' is not among the 1000 classes"),
        ("n99999999", None, "its class 'n99999999' is not among the 1000 classes"),
        ("", entries(3), "must be a list of 50,000 lists, one for each validation image, got 3 entries"),
        ("", {"a": [1]}, "must be a list of 50,000 lists, one for each validation image, got dict"),
        ("", entries(first=[1000]), r"entry 1 of .*labels.json must be a list of classes from 0 to 999, got \[1000\]"),
        ("", entries(first=7), "entry 1 of .*labels.json must be a list of classes from 0 to 999, got 7"),
        ("", entries(first=[]), "none of the 1 images of .* has a right label"),
        ("", "nothing", "no such file of labels; labels=real are those of ImageNet-ReaL"),
        ("", "broken", "is not valid JSON"),
        ("", "binary", "is not valid JSON"),
    ],
)
def test_what_does_not_fit_is_one_sentence(folder, content, message, loaded, photographs, tmp_path):
    save(photographs[0], validation_file(tmp_path / "images", 1, folder))
    if folder:
        save(photographs[0], tmp_path / "images" / (SYNSETS[0] if folder.startswith("n") else "0") / "a.jpg")
    labels = None
    if content is not None:
        labels = str(tmp_path / "labels.json")
        if content != "nothing":
            texts = {"broken": b"[1", "binary": b"\x94\xff"}
            Path(labels).write_bytes(texts[content] if isinstance(content, str) else json.dumps(content).encode())
    with pytest.raises(TrainingError, match=message):
        evaluate(loaded, str(tmp_path / "images"), labels=labels)


def test_images_without_a_number_are_named(loaded, photographs, tmp_path):
    save(photographs[0], tmp_path / "cat.jpg")
    save(photographs[0], validation_file(tmp_path, 2))
    save(photographs[0], validation_file(tmp_path, 50_001))
    with pytest.raises(TrainingError, match=r"2 images cannot be used; .*no number of a validation image"):
        evaluate(loaded, str(tmp_path), labels="real")


def test_labels_need_a_network_of_imagenet_and_no_restriction(loaded, photographs, tmp_path, weights):
    save(photographs[0], validation_file(tmp_path, 2))
    with pytest.raises(TrainingError, match="keeps to the classes that have a folder"):
        evaluate(loaded, str(tmp_path), labels="real", restrict=True)
    with pytest.raises(TrainingError, match="needs a folder of ImageNet's validation images, got digits"):
        evaluate(loaded, "digits", labels="real")
    other = load_network(MODEL, [f"weights={small_weights(tmp_path, 3)}", *OPTIONS])
    with pytest.raises(TrainingError, match="classes of ImageNet-1k, and the network has other classes"):
        evaluate(other, str(tmp_path), labels="real")


@pytest.fixture(autouse=True)
def _notes(caplog):
    caplog.set_level(logging.WARNING)
