"""The splits of annotated datasets."""

import json
import shutil

import numpy as np
import pytest
from annotated_files import WIDE, box_mask, coco_content, voc_object, write_coco, write_image, write_png, write_voc

from interlayer.training.data.annotated_sources import open_label_maps, open_objects
from interlayer.training.files import TrainingError


def test_coco_with_a_json_file_each(tmp_path):
    content = coco_content()
    for annotation in content["annotations"]:
        annotation["segmentation"] = {"size": [30, 40], "counts": [1199, 1]}
    content["annotations"].pop()  # the second image has no objects
    file = write_coco(tmp_path, content)
    shutil.copy(file, tmp_path / "val.json")
    data = open_objects(tmp_path, {"bad": "skip", "masks": True})
    assert (len(data.train), data.validation, len(data.test)) == (1, None, 2)
    assert data.classes == ["cat", "dog"]
    assert len(data.problems.found) == 1
    assert data.train.has_masks
    assert not open_objects(tmp_path, {"bad": "skip"}).train.has_masks
    with pytest.raises(TrainingError, match="image 9 cannot be used: it has no objects"):
        open_objects(tmp_path, {})


def test_coco_as_it_is_distributed(tmp_path):
    for split in ("train2017", "val2017"):
        for image, name in enumerate(("wide.png", "tall.png")):
            write_image(tmp_path / split / name, [WIDE, (20, 36)][image])
        (tmp_path / "annotations").mkdir(exist_ok=True)
        (tmp_path / "annotations" / f"instances_{split}.json").write_text(json.dumps(coco_content()))
    data = open_objects(tmp_path, {})
    assert data.train.images[0].file == tmp_path / "train2017" / "wide.png"
    assert data.test.images[0].file == tmp_path / "val2017" / "wide.png"


def test_voc_with_three_lists(tmp_path):
    objects = {name: [voc_object("rbc", (5, 5, 9, 9)), voc_object("wbc", (5, 5, 9, 9), 1)] for name in "abc"}
    write_voc(tmp_path, objects, ["a"])
    for name, split in (("b", "val"), ("c", "test"), ("a", "trainval")):
        (tmp_path / "ImageSets" / "Main" / f"{split}.txt").write_text(name)
    data = open_objects(tmp_path, {})
    assert [split.name(0)[-5] for split in (data.train, data.validation, data.test)] == ["a", "b", "c"]
    assert [len(split.target(0)["labels"]) for split in (data.train, data.test)] == [1, 2]  # difficult ones are crowds


def masks(root, numbers):
    for split in ("train", "val"):
        write_image(root / "images" / split / "a.png", WIDE)
        write_png(root / "masks" / split / "a.png", numbers)


def test_instances_and_label_maps(tmp_path):
    masks(tmp_path, box_mask(WIDE, [5, 6, 10, 8]))
    data = open_objects(tmp_path, {})
    assert data.classes == ["object"]
    assert data.test.target(0)["boxes"].tolist() == [[5, 6, 15, 14]]
    data = open_label_maps(tmp_path, {"classes": 2.0})
    assert data.classes == ["0", "1"]
    assert data.test.target(0).sum() == 80
    (tmp_path / "classes.txt").write_text("road\nsky\n")
    assert open_label_maps(tmp_path, {}).classes == ["road", "sky"]
    ignored = open_label_maps(tmp_path, {"classes": ["a"], "ignore": 1})
    assert set(np.unique(ignored.train.target(0))) == {0, 255}


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(TrainingError, match="no such folder"):
        open_objects(tmp_path / "none", {})
    with pytest.raises(TrainingError, match="holds no annotated images: expected ImageSets"):
        open_objects(tmp_path, {})
    with pytest.raises(TrainingError, match="no data option 'worse': bad, masks"):
        open_objects(tmp_path, {"worse": 1})
    with pytest.raises(TrainingError, match="give their names or their number"):
        open_label_maps(tmp_path, {})
    masks(tmp_path, box_mask(WIDE, [5, 6, 10, 8]))
    with pytest.raises(TrainingError, match="ignore=-1: expected numbers"):
        open_label_maps(tmp_path, {"classes": 2, "ignore": -1})
    shutil.rmtree(tmp_path / "images" / "val")
    with pytest.raises(TrainingError, match="neither validation nor test"):
        open_objects(tmp_path, {})
    (tmp_path / "images" / "train").rename(tmp_path / "images" / "test")
    with pytest.raises(TrainingError, match="no training images: it holds test"):
        open_label_maps(tmp_path, {"classes": 2})
