"""Annotated datasets: what they contain, and what happens to annotations that cannot be used."""

import copy
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from annotated_files import (
    WIDE,
    box_mask,
    coco_content,
    rle_of,
    voc_object,
    write_coco,
    write_image,
    write_png,
    write_voc,
)
from torchvision import tv_tensors

from interlayer.tasks.run_lengths import MaskError, RunLengths, counts_of_text
from interlayer.training.data.annotated import AnnotationError, annotation_problems
from interlayer.training.data.coco import read_coco
from interlayer.training.data.mask_folders import IGNORED, LabelMaps, read_instances
from interlayer.training.data.voc import read_voc
from interlayer.training.files import TrainingError


def coco(root, content, bad="fail", **options):
    pytest.importorskip("faster_coco_eval")
    problems = annotation_problems(bad)
    return read_coco(write_coco(root, content), root / "images", problems, masks=True, **options), problems


# Run lengths


@pytest.mark.parametrize("seed", range(8))
def test_run_lengths_are_those_of_pycocotools(seed):
    mask_api = pytest.importorskip("pycocotools.mask")
    generator = np.random.default_rng(seed)
    mask = generator.random((17 + seed, 40)) < generator.random()
    encoded = mask_api.encode(np.asfortranarray(mask.astype(np.uint8)))
    for counts in (encoded["counts"], encoded["counts"].decode(), rle_of(mask)["counts"]):
        runs = RunLengths.of({"size": encoded["size"], "counts": counts}, *mask.shape)
        assert (runs.decode() == mask).all()
        assert runs.area == mask.sum()
    assert RunLengths.encode(mask).as_dict() == {"size": encoded["size"], "counts": encoded["counts"].decode()}


@pytest.mark.parametrize(
    ("size", "counts", "message"),
    [
        ([3, 4], [12], r"size \[3, 4\], expected \[4, 3\]"),
        ([4, 3], [5, 6], "add up to 11, expected 4 x 3 = 12"),
        ([4, 3], [-1, 13], "no list of whole numbers"),
        ([4, 3], None, "no list of whole numbers"),
        ([4, 3], "zz", "'z'"),
        ([4, 3], "P", "ends within a count"),
        ([4, 3], "O", "negative count"),
    ],
)
def test_run_lengths_that_do_not_fit_are_refused(size, counts, message):
    with pytest.raises(MaskError, match=message):
        RunLengths.of({"size": size, "counts": counts}, 4, 3)


@pytest.mark.parametrize("value", [0, 1])
def test_masks_of_one_value_and_large_counts_are_encoded(value):
    mask_api = pytest.importorskip("pycocotools.mask")
    mask = np.full((700, 500), value, dtype=np.uint8)
    assert RunLengths.encode(mask).as_dict()["counts"] == mask_api.encode(np.asfortranarray(mask))["counts"].decode()


def test_text_of_no_counts():
    assert counts_of_text("") == []


# COCO


def test_coco_gives_boxes_labels_and_masks(tmp_path):
    images, problems = coco(tmp_path, coco_content())
    assert images.classes == ["cat", "dog"]  # in the order of the ids
    assert not problems.found
    assert images.open(1).size == (20, 36)
    target = images.target(0)
    assert isinstance(target["boxes"], tv_tensors.BoundingBoxes)
    assert isinstance(target["masks"], tv_tensors.Mask)
    assert target["boxes"].tolist() == [[5, 6, 15, 14], [20, 10, 40, 30]]
    assert target["labels"].tolist() == [1, 0]
    assert target["area"].tolist() == [80, 400]
    assert target["image_id"].item() == 7
    for mask, box in zip(target["masks"], ([5, 6, 10, 8], [20, 10, 20, 20]), strict=True):
        assert (mask.numpy() == box_mask(WIDE, box)).all()
    assert torch.allclose(images.aspect_ratios, torch.tensor([40 / 30, 20 / 36]))


def changed(change):
    content = copy.deepcopy(coco_content())
    change(content)
    return content


def edit(number, **values):
    return changed(lambda content: content["annotations"][number - 1].update(values))


BAD_COCO = {
    "missing file": (changed(lambda c: c["images"][1].update(file_name="none.png")), "image 9", "none.png is missing"),
    "outside": (edit(1, bbox=[35, 6, 10, 8]), "annotation 1", "outside its image of 40 x 30"),
    "no area": (edit(1, bbox=[5, 6, 0, 8]), "annotation 1", "has no area"),
    "not numbers": (edit(1, bbox=[5, 6, float("nan"), 8]), "annotation 1", "not four finite numbers"),
    "class": (edit(1, category_id=8), "annotation 1", "class 8 is not among the categories"),
    "without objects": (changed(lambda c: c["annotations"].pop()), "image 9", "no objects"),
    "mask size": (edit(2, segmentation={"size": [5, 5], "counts": [25]}), "annotation 2", r"size \[5, 5\]"),
    "rle": (edit(2, segmentation={"size": [30, 40], "counts": [7, 8]}), "annotation 2", "does not fit"),
    "empty mask": (edit(2, segmentation={"size": [30, 40], "counts": [1200]}), "annotation 2", "no area"),
    "polygon": (edit(1, segmentation=[[1, 2, 3, 4]]), "annotation 1", "three corners"),
    "no mask": (edit(1, segmentation=None), "annotation 1", "has no mask"),
    "annotation id": (edit(2, id=1), "annotation 1", "duplicate"),
    "image id": (changed(lambda c: c["images"].append(c["images"][0])), "image 7", "duplicate"),
    "image of a list": (edit(1, image_id=[7]), "annotation 1", r"image \[7\] is not among the images"),
    "class of a list": (edit(1, category_id=[3]), "annotation 1", r"class \[3\] is not among the categories"),
    "image of none": (edit(1, image_id=8), "annotation 1", "image 8 is not among the images"),
}


@pytest.mark.parametrize("case", BAD_COCO)
def test_bad_coco_annotations_fail_or_are_skipped(tmp_path, case):
    content, number, reason = BAD_COCO[case]
    with pytest.raises(TrainingError, match=f"train.json {number}.*{reason}.*data_options.bad=skip"):
        coco(tmp_path, content)
    images, problems = coco(tmp_path, content, "skip")
    assert len(problems.found) == 1
    assert 1 <= len(images) <= 2
    for index in range(len(images)):
        target = images.target(index)
        assert len(target["boxes"]) == len(target["masks"]) == len(target["labels"]) >= 1


def test_one_error_names_the_first_and_the_count(tmp_path):
    content = edit(1, bbox=[5, 6, 0, 8])
    content["annotations"][1]["category_id"] = 8
    # both objects of image 7 cannot be used, so neither can the image
    with pytest.raises(TrainingError, match=r"3 annotations cannot be used; the first is .*annotation 1: .*no area"):
        coco(tmp_path, content)


def test_images_without_objects_are_kept_for_evaluation_unless_they_lost_theirs(tmp_path):
    content = changed(lambda c: c["annotations"].pop())
    images, problems = coco(tmp_path, content, keep_empty=True)
    assert not problems.found
    assert images.target(1)["boxes"].shape == (0, 4)
    assert images.target(1)["masks"].shape == (0, 36, 20)
    images, problems = coco(tmp_path, edit(3, bbox=[0, 0, 0, 0]), "skip", keep_empty=True)
    assert [image.image_id for image in images.images] == [7]


def test_crowds_are_left_out_of_training(tmp_path):
    content = edit(1, iscrowd=1)
    assert coco(tmp_path, content)[0].target(0)["iscrowd"].tolist() == [0]
    assert coco(tmp_path, content, crowds=True)[0].target(0)["iscrowd"].tolist() == [1, 0]


def test_classes_of_training_are_matched_by_name(tmp_path):
    images, _ = coco(tmp_path, coco_content(), classes=["dog", "cat"])
    assert images.target(0)["labels"].tolist() == [0, 1]
    with pytest.raises(TrainingError, match="class 1 is 'cat', which the training images lack"):
        coco(tmp_path, coco_content(), classes=["dog"])


def test_an_image_of_another_size_is_refused_when_it_is_read(tmp_path):
    images, _ = coco(tmp_path, changed(lambda c: c["images"][0].update(width=41, height=30)), "skip")
    write_image(tmp_path / "images" / "tall.png", (21, 36))
    with pytest.raises(AnnotationError, match="21 x 36 pixels, but its annotations are of 20 x 36"):
        images.open(len(images) - 1)


@pytest.mark.parametrize("text", ["{", "[]", '{"images": []}'])
def test_files_that_are_not_coco(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(TrainingError, match=r"a\.json is not"):
        read_coco(tmp_path / "a.json", tmp_path, annotation_problems("skip"))


def test_bad_is_fail_or_skip():
    with pytest.raises(TrainingError, match="bad=ignore: expected fail or skip"):
        annotation_problems("ignore")


# Pascal VOC


def test_voc_counts_pixels_from_one(tmp_path):
    objects = [voc_object("rbc", (1, 1, 40, 30)), voc_object("wbc", (5, 6, 15, 14), difficult=1)]
    root = write_voc(tmp_path, {"a": objects})
    images = read_voc(root, "train", annotation_problems("fail"), crowds=True)
    assert images.classes == ["rbc", "wbc"]
    target = images.target(0)
    assert target["boxes"].tolist() == [[0, 0, 40, 30], [4, 5, 15, 14]]
    assert target["iscrowd"].tolist() == [0, 1]
    assert "masks" not in target


@pytest.mark.parametrize(
    ("objects", "lines", "number", "reason"),
    [
        ([voc_object("rbc", (5, 5, 5, 9))], ["a", "b"], "b.xml object 1", "no area"),
        ([voc_object("rbc", (5, 5, 50, 9))], ["a", "b"], "b.xml object 1", "outside its image of 40 x 30"),
        ([voc_object("new", (5, 5, 9, 9))], ["a", "b"], "b.xml object 1", "class 'new' is not among"),
        ([voc_object("rbc", (5, 5, "x", 9))], ["a", "b"], "b.xml object 1", "not four numbers"),
        ([], ["a", "b"], "b.xml", "no objects"),
        (["<"], ["a", "b"], "train.txt line 2", "not XML"),
        ([voc_object("rbc", (5, 5, 9, 9))], ["a", "c"], "train.txt line 2", "c.xml is missing"),
        ([voc_object("rbc", (5, 5, 9, 9))], ["a", "b", "a"], "train.txt line 3", "duplicate"),
    ],
)
def test_bad_voc_annotations_fail_or_are_skipped(tmp_path, objects, lines, number, reason):
    root = write_voc(tmp_path, {"a": [voc_object("rbc", (5, 5, 9, 9))], "b": objects}, lines)
    with pytest.raises(TrainingError, match=f"{number}.*{reason}"):
        read_voc(root, "train", annotation_problems("fail"), classes=["rbc"])
    problems = annotation_problems("skip")
    images = read_voc(root, "train", problems, classes=["rbc"])
    assert any(reason in text for text in problems.found.values())
    assert all(len(images.target(index)["boxes"]) for index in range(len(images)))


# Folders of masks


def test_instances_of_one_file_or_of_a_file_each(tmp_path):
    for name in ("a", "b"):
        write_image(tmp_path / "images" / f"{name}.png", WIDE)
    first, second = box_mask(WIDE, [5, 6, 10, 8]), box_mask(WIDE, [20, 10, 20, 20])
    write_png(tmp_path / "masks" / "a.png", first * 3 + second * 200)
    write_png(tmp_path / "masks" / "b" / "0.png", first * 255)
    write_png(tmp_path / "masks" / "b" / "cell" / "1.png", second * 255)
    images = read_instances(tmp_path / "images", tmp_path / "masks", annotation_problems("fail"))
    assert images.classes == ["cell", "object"]
    for index in range(2):
        target = images.target(index)
        assert target["boxes"].tolist() == [[5, 6, 15, 14], [20, 10, 40, 30]]
        assert target["area"].tolist() == [80, 400]
        assert (target["masks"].numpy() == np.stack([first, second])).all()
    assert images.target(1)["labels"].tolist() == [1, 0]


def test_bad_mask_files_fail_or_are_skipped(tmp_path):
    for name in ("a", "b", "c", "d", "e"):
        write_image(tmp_path / "images" / f"{name}.png", WIDE)
    write_png(tmp_path / "masks" / "a.png", box_mask(WIDE, [5, 6, 10, 8]))
    write_png(tmp_path / "masks" / "b.png", np.ones((5, 5)))
    write_png(tmp_path / "masks" / "c.png", np.zeros((30, 40)))
    write_png(tmp_path / "masks" / "d.png", np.zeros((30, 40, 3)))
    folders = tmp_path / "images", tmp_path / "masks"
    with pytest.raises(TrainingError, match="annotations cannot be used"):
        read_instances(*folders, annotation_problems("fail"))
    problems = annotation_problems("skip")
    assert len(read_instances(*folders, problems)) == 1
    reasons = " ".join(problems.found.values())
    for reason in ("5 x 5 pixels, but its image", "no objects", "3 channels", "e.png is missing"):
        assert reason in reasons


def test_label_maps(tmp_path):
    for name in "abcd":
        write_image(tmp_path / "images" / f"{name}.png", WIDE)
    numbers = np.zeros((30, 40))
    numbers[0], numbers[1] = 11, 2
    write_png(tmp_path / "masks" / "a.png", numbers)
    write_png(tmp_path / "masks" / "b.png", np.full((30, 40), 11))
    write_png(tmp_path / "masks" / "c.png", np.full((30, 40), 3))
    write_png(tmp_path / "masks" / "d.png", np.zeros((5, 5)))
    folders, classes = (tmp_path / "images", tmp_path / "masks"), ["road", "sky", "car"]
    with pytest.raises(TrainingError, match=r"d\.png cannot be used: it has 5 x 5 pixels, but its image"):
        LabelMaps(*folders, classes, annotation_problems("fail"), ignore=[11])
    maps = LabelMaps(*folders, classes, annotation_problems("skip"), ignore=[11])
    assert len(maps) == 3
    target = maps.target(0)
    assert isinstance(target, tv_tensors.Mask)
    assert target[:, 0].tolist() == [IGNORED, 2, *[0] * 28]
    with pytest.raises(AnnotationError, match=r"no pixel of its mask .*b\.png has a class"):
        maps.target(1)
    with pytest.raises(AnnotationError, match=r"1,200 pixels of its mask .*c\.png have the unknown class 3"):
        maps.target(2)


# Real data


def real(name):
    root = os.environ.get("INTERLAYER_DENSE_DATA", "")
    folder = Path(root) / name
    if not root or not folder.is_dir():
        pytest.skip(f"INTERLAYER_DENSE_DATA names no folder with {name}")
    return folder


def test_nuclei_masks_have_the_boxes_and_areas_of_the_file():
    from torchvision.ops import masks_to_boxes

    root = real("nuclei")
    images = read_coco(root / "val.json", root / "images", annotation_problems("fail"), masks=True)
    for index in range(5):
        target = images.target(index)
        assert target["masks"].flatten(1).sum(1).tolist() == target["area"].tolist()
        assert ((masks_to_boxes(target["masks"]) + torch.tensor([0, 0, 1, 1])) == target["boxes"]).all()


def test_bccd_has_a_box_without_area_in_its_training_images():
    root, problems = real("BCCD"), annotation_problems("skip")
    assert len(read_voc(root, "train", problems)) == 205
    assert [name.split("/")[-1] for name in problems.found] == ["BloodImage_00343.xml object 4"]
