"""Folders of images: usual names of splits are understood, and what is ambiguous is refused with what was seen."""

from pathlib import Path

import pytest
from PIL import Image

from interlayer.training.data import ClassNames, Problems, open_data, open_data_to_evaluate
from interlayer.training.files import TrainingError

PETS = ("bird", "cat", "dog")


def tree(root: Path, *folders: str, images: int = 4) -> Path:
    """Creates folders with a few small images each."""
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
        for number in range(images):
            Image.new("RGB", (4, 4)).save(root / folder / f"{number}.png")
    return root


def split_tree(root: Path, *splits: str, classes=PETS) -> Path:
    return tree(root, *(f"{split}/{name}" for split in splits for name in classes))


def sizes(data):
    return tuple(len(split) if split is not None else 0 for split in (data.train, data.validation, data.test))


@pytest.mark.parametrize(
    "names",
    [
        ("train", "val", "test"),
        ("training", "valid", "testing"),
        ("Train", "Validation", "Test"),
        ("TRAIN", "dev", "tst"),
        ("training_set", "validation-images", "Test Data"),
        ("train2017", "val2017", "testset"),
    ],
)
def test_usual_names_of_splits_are_understood(small, tmp_path, names):
    data = open_data(small(data=str(split_tree(tmp_path, *names))))
    assert (data.classes, sizes(data)) == (list(PETS), (12, 12, 12))


def test_training_and_valid_are_not_two_classes(small, tmp_path):
    data = open_data(small(data=str(split_tree(tmp_path, "training", "valid"))))
    assert (data.classes, sizes(data)) == (list(PETS), (12, 0, 12))


@pytest.mark.parametrize("inside", ["images", "pets"])
def test_splits_inside_the_only_folder_are_found(small, tmp_path, inside):
    split_tree(tmp_path / inside, "train", "val")
    (tmp_path / "__MACOSX" / "train").mkdir(parents=True)
    assert open_data(small(data=str(tmp_path))).classes == list(PETS)


def test_images_beside_annotations_are_found(small, tmp_path):
    split_tree(tmp_path / "images", "train", "val")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "all.csv").write_text("")
    assert open_data(small(data=str(tmp_path))).classes == list(PETS)


def test_a_class_can_be_named_train(small, tmp_path):
    """A split holds class folders, a class holds images."""
    data = open_data(small(data=str(tree(tmp_path, "bus", "car", "train"))))
    assert data.classes == ["bus", "car", "train"]


def test_classes_can_have_the_name_of_a_split_in_theirs(small, tmp_path):
    """A steam_train is no split, even if its images lie in folders, and neither are test_tube and train_station."""
    data = open_data(small(data=str(tree(tmp_path, "steam_train/a", "steam_train/b", "ship"))))
    assert data.classes == ["ship", "steam_train"]
    data = open_data(small(data=str(tree(tmp_path / "things", "test_tube", "train_station", images=5))))
    assert data.classes == ["test_tube", "train_station"]


def test_folders_that_the_system_made_are_no_classes(small, tmp_path):
    split_tree(tmp_path, "train", "val")
    for folder in (
        ".ipynb_checkpoints",
        "__MACOSX",
        "train/.ipynb_checkpoints",
        "train/cat/.ipynb_checkpoints",
        "val/@eaDir",
    ):
        tree(tmp_path, folder)
    for file in (".DS_Store", "train/.DS_Store", "train/cat/Thumbs.db", "train/._cat.png"):
        (tmp_path / file).write_bytes(b"x")
    data = open_data(small(data=str(tmp_path)))
    assert (data.classes, sizes(data)) == (list(PETS), (12, 0, 12))


def test_folders_without_images_may_lie_beside_splits(small, tmp_path):
    split_tree(tmp_path, "train", "val")
    (tmp_path / "devkit").mkdir()
    (tmp_path / "devkit" / "readme.txt").write_text("")
    assert open_data(small(data=str(tmp_path))).classes == list(PETS)


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["train/a", "train/b", "val/a", "valid/a"], "holds val/ and valid/, which both name the validation split"),
        (["Train/a", "train/b"], "holds Train/ and train/, which both name the train split"),
        (["train/a", "train/b", "val/a", "a", "b"], "holds train/ and val/ and also images in a/ and b/: move"),
        (["val/a", "val/b", "val/c"], "holds val/ with 3 classes, but no training images: expected"),
        (["train", "val"], "holds train/ and val/ without class folders: expected .*train/CLASS/IMAGE"),
        (["train/a", "train/b", "test"], "holds train/ with class folders, but test/ without"),
        (["a/train", "a/val", "b/train", "b/val"], r"holds splits inside its folders \(a/train, a/val\)"),
        (["train/a", "val/a"], "has only one class, a: a classifier needs at least two"),
        (["pets_train/a", "pets_train/b", "pets_test/a"], "holds pets_test/ and pets_train/, which seem to be splits"),
        (["train_set/a", "train2017/b"], "holds train2017/ and train_set/, which both name the train split"),
        (["pets/a", "pets/b"], "has only one class, pets: .*; if the 2 folders in .*pets are the classes, give it as"),
    ],
)  # fmt: skip
def test_ambiguous_trees_are_refused_with_what_was_seen(small, tmp_path, folders, message):
    tree(tmp_path, *folders, images=5)
    with pytest.raises(TrainingError, match=message):
        open_data(small(data=str(tmp_path)))


def test_named_folders_settle_what_is_ambiguous(small, tmp_path):
    split_tree(tmp_path, "train", "val", "valid", "extra")
    options = {"train_split": "train", "test_split": "valid"}
    data = open_data(small(data=str(tmp_path), data_options=options))
    assert (sizes(data), Path(data.test.name(0)).parts[-3]) == ((12, 0, 12), "valid")
    with pytest.raises(
        TrainingError, match=r"train_split=nowhere: .* has no such folder, it holds extra/, train/, val/"
    ):
        open_data(small(data=str(tmp_path), data_options={"train_split": "nowhere"}))
    with pytest.raises(TrainingError, match="a folder of images has no option 'tran_split': train_split, "):
        open_data(small(data=str(tmp_path), data_options={"tran_split": "train"}))


def test_classes_that_differ_between_splits_are_named(small, tmp_path):
    split_tree(tmp_path, "train")
    split_tree(tmp_path, "val", classes=("Cat", "dog", "fish"))
    expected = "its class 'Cat' is not among the 3 classes of training, and neither are fish; val lacks bird, cat"
    with pytest.raises(TrainingError, match=expected):
        open_data(small(data=str(tmp_path)))
    skipped = open_data(small(data=str(tmp_path), on_bad_image="skip"))
    assert (len(skipped.test), len(skipped.problems.found)) == (4, 2)


def test_a_class_that_only_training_has_is_noted(small, tmp_path):
    split_tree(tmp_path, "train")
    split_tree(tmp_path, "val", classes=("cat", "dog"))
    assert "lacks 1 of the 3 classes: bird" in open_data(small(data=str(tmp_path))).notes[0]


def test_nested_class_folders_are_one_class_and_noted(small, tmp_path):
    tree(tmp_path, "animals/cat", "animals/dog", "vehicles/car", "vehicles/bus")
    data = open_data(small(data=str(tmp_path)))
    assert data.classes == ["animals", "vehicles"]
    assert "hold only folders: animals (cat, dog) is one class" in data.notes[0]


# Evaluation


def opened(small, root, classes=PETS, split=None, **changes):
    recipe = small(data=str(root), **changes)
    names = classes if isinstance(classes, ClassNames) else ClassNames(list(classes))
    return open_data_to_evaluate(recipe, names, split, Problems("fail", skip_option="--skip-bad"))


@pytest.mark.parametrize(
    ("splits", "chosen"),
    [(["val"], "val"), (["train", "val"], "val"), (["train", "val", "test"], "test"), (["training"], "training")],
)
def test_the_split_that_is_evaluated_is_the_first_of_test_validation_train(small, tmp_path, splits, chosen):
    data = opened(small, split_tree(tmp_path, *splits))
    assert Path(data.test.name(0)).parts[-3] == chosen
    assert f"evaluating {tmp_path / chosen}" in data.notes[0]


def test_any_split_can_be_evaluated(small, tmp_path):
    split_tree(tmp_path, "train", "val")
    assert Path(opened(small, tmp_path, split="train").test.name(0)).parts[-3] == "train"
    with pytest.raises(TrainingError, match="has no test split: it holds train, val"):
        opened(small, tmp_path, split="test")


def test_class_folders_are_matched_by_name_and_not_by_order(small, tmp_path):
    """A folder with some of the classes would otherwise get the labels of the first ones."""
    data = opened(small, tree(tmp_path, "dog", "Cat"))
    assert {Path(data.test.name(i)).parent.name: int(data.test.labels[i]) for i in range(8)} == {"Cat": 1, "dog": 2}
    assert "2 of the 3 classes have a folder" in data.notes[0]


def test_folders_of_other_classes_are_one_sentence(small, tmp_path):
    with pytest.raises(TrainingError, match="has other classes than training: a, b instead of bird, cat, dog"):
        opened(small, tree(tmp_path / "none", "a", "b"))
    with pytest.raises(TrainingError, match=r"its class 'fish' is not among the 3 classes .* with --skip-bad"):
        opened(small, tree(tmp_path / "some", "cat", "fish"))


def imagenet():
    """ImageNet's classes, as a network with 1000 outputs has them."""
    from torch import nn

    head = nn.Linear(1, 1000)
    head.num_classes = 1000
    names = ClassNames.imagenet(head)
    assert names is not None
    return names


@pytest.mark.parametrize(
    ("folders", "labels"),
    [
        (["n01440764", "n02123045"], [0, 281]),
        (["n01440764_tench", "n02123045-tabby"], [0, 281]),
        (["tench", "tabby_cat"], [0, 281]),
        (["Tench, Tinca tinca", "Egyptian cat"], [0, 285]),
        (["0", "10", "999"], [0, 10, 999]),
        (["crane"], []),
        (["crane (n02012849)"], [134]),
    ],
)
def test_folders_of_wordnet_ids_names_and_numbers_are_imagenets_classes(folders, labels):
    """ "crane" names a bird and a machine, so it is not guessed."""
    assert list(imagenet().match(folders).values()) == labels


def test_every_class_of_imagenet_has_a_name_of_its_own():
    names = imagenet()
    assert len(set(names.names)) == 1000
    assert names.match(names.names) == {name: label for label, name in enumerate(names.names)}


def test_a_class_is_named_in_several_ways_and_the_nearest_are_suggested():
    """A name, a further name, a WordNet id or a number gives the same label; a number that is a name is the name."""
    names = imagenet()
    assert [names.label(text) for text in ("tabby", "Tabby Cat", "n02123045", "281")] == [281] * 4
    assert ClassNames(["7", "5"]).label("5") == 1
    assert ClassNames(["7", "5"]).label("0") == 0
    for text, near in (("taby", "tabby"), ("retriever", "golden retriever"), ("1000", "tench")):
        with pytest.raises(TrainingError, match=rf"'{text}' is no class .*{near}.* a number from 0 to 999"):
            names.label(text)
