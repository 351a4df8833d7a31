"""The sections of reports about boxes, masks and label maps, from records and annotations alone."""

import numpy as np
import pytest
import torch
from PIL import Image

from interlayer.tasks import FinishedRun
from interlayer.tasks.detection_sections import (
    detection_comparison_sections,
    detection_run_sections,
    whole_masks,
)
from interlayer.tasks.label_map_sections import (
    label_map_comparison_sections,
    label_map_run_sections,
    without_padding,
)

CLASSES = ["cat", "dog"]
BOXES = [[5.0, 5, 25, 25], [30, 10, 55, 40]]


class Objects:
    """Images with two objects each."""

    def __init__(self, count=8):
        self.count = count

    def name(self, index):
        return f"folder/{index}.png"

    def open(self, index):
        return Image.new("RGB", (64, 48), (200, 200, 200))

    def target(self, index):
        return {"boxes": torch.tensor(BOXES), "labels": torch.tensor([0, 1]), "iscrowd": torch.zeros(2)}


class Maps(Objects):
    def target(self, index):
        labels = torch.zeros(48, 64, dtype=torch.int64)
        labels[:, 32:] = 1
        labels[:2] = 255
        return labels


def detections(missed, places=None, masks=False):
    """Records in which the first `missed` images lack the second object and have a wrong one."""
    places = torch.arange(8) if places is None else torch.tensor(places)
    count = len(places)
    records = {
        "boxes": torch.zeros(count, 3, 4), "labels": torch.full((count, 3), -1, dtype=torch.int16),
        "scores": torch.zeros(count, 3, dtype=torch.float16), "places": places,
    }  # fmt: skip
    if masks:
        records["masks"] = torch.full((count, 3, 98), 255, dtype=torch.uint8)
    for row in range(count):
        wrong = row < missed
        records["boxes"][row, :2] = torch.tensor([BOXES[0], [0, 0, 6, 6] if wrong else BOXES[1]])
        records["labels"][row, :2] = torch.tensor([0, 1])
        records["scores"][row, :2] = torch.tensor([0.9, 0.8])
    return records


def text_of(picture):
    return "".join(span.text for line in picture.lines for span in line)


def test_a_run_of_detections_shows_pictures_the_worst_and_curves():
    run = FinishedRun("net", {}, detections(missed=2))
    beside, worst, curves = detection_run_sections(run, Objects(), CLASSES)
    assert [section.title for section in (beside, worst, curves)] == [
        "Predictions beside the truth", "Worst images", "Precision and recall",
    ]  # fmt: skip
    assert len(beside.rows) == 6
    assert text_of(beside.rows[0][0]) == "truth: 2 objects, 0.png"
    assert text_of(beside.rows[0][1]) == "predicted: 1 right, 1 wrong, 1 missed, F1 0.50"
    assert text_of(beside.rows[-1][1]) == "predicted: 2 right, 0 wrong, 0 missed, F1 1.00"
    assert "2 of 8 test images" in worst.text
    assert [text_of(row[0])[-5:] for row in worst.rows] == ["0.png", "1.png"]
    assert [name for name, _ in beside.swatches] == CLASSES
    cat, dog = curves.plot.lines
    assert np.mean(cat.y) == 1
    assert 0.3 < np.mean(dog.y) < 0.9
    assert dog.name == f"dog, AP50 {np.mean(dog.y):.3f}"
    assert cat.color != dog.color
    assert curves.tables[0].rows[0] == ["cat", "8", "1.0000", "100.0%", "100.0%"]
    assert curves.tables[0].rows[1][3:] == ["75.0%", "75.0%"]


def test_records_of_some_images_belong_to_their_places():
    run = FinishedRun("net", {}, detections(missed=1, places=[3, 6]))
    beside, worst, _ = detection_run_sections(run, Objects(), CLASSES)
    assert [text_of(row[0])[-5:] for row in beside.rows] == ["3.png", "6.png"]
    assert [text_of(row[0])[-5:] for row in worst.rows] == ["3.png"]


def test_a_run_without_mistakes_and_without_images():
    run = FinishedRun("net", {}, detections(missed=0))
    assert "None" in detection_run_sections(run, Objects(), CLASSES)[1].text
    assert detection_run_sections(run, None, CLASSES) == []
    assert detection_run_sections(FinishedRun("net", {}, {}), Objects(), CLASSES) == []


def test_networks_that_find_nothing():
    records = detections(missed=0)
    records["labels"][:] = -1
    run = FinishedRun("net", {}, records)
    beside, *_ = detection_run_sections(run, Objects(), CLASSES)
    assert text_of(beside.rows[0][1]).startswith("predicted: 0 right, 0 wrong, 2 missed")
    (curves,) = detection_comparison_sections([run], Objects(), CLASSES)
    assert curves.plot.lines[0].name == "net, AP50 0.000"


def test_a_comparison_of_detections_shows_where_networks_differ():
    runs = [FinishedRun("first", {}, detections(missed=3)), FinishedRun("second", {}, detections(missed=1))]
    differ, curves = detection_comparison_sections(runs, Objects(), CLASSES)
    assert "second has a higher F1 than first on 2 of 8 test images and a lower one on 0" in differ.text
    assert [text_of(row[0])[-5:] for row in differ.rows] == ["1.png", "2.png"]
    assert [len(row) for row in differ.rows] == [3, 3]
    assert text_of(differ.rows[0][2]) == "second: 2 right, 0 wrong, 0 missed, F1 1.00"
    assert [line.name[:6] for line in curves.plot.lines] == ["first,", "second"]
    assert curves.tables[0].columns == ["class", "objects", "AP50 of first", "AP50 of second"]


def test_recorded_masks_are_put_into_their_boxes():
    mask = np.zeros((28, 28), dtype=np.uint8)
    mask[:14] = 1
    bits = torch.from_numpy(np.packbits(mask.reshape(1, -1), axis=1))
    whole = whole_masks(bits, torch.tensor([[10.0, -4, 30, 16]]), 24, 40)
    expected = torch.zeros(24, 40, dtype=torch.bool)
    expected[:6, 10:30] = True
    assert torch.equal(whole[0], expected)
    records = detections(missed=0, masks=True)
    section = detection_run_sections(FinishedRun("net", {}, records), Objects(), CLASSES)[0]
    assert section.rows[0][1].image.getpixel((100, 150)) != (200, 200, 200), "the mask is drawn"


def label_maps(shift):
    predicted = torch.full((8, 48, 70), 255, dtype=torch.uint8)
    predicted[:, :, :64] = (torch.arange(64) >= 32 + shift).byte()
    counts = torch.tensor([[500, 5], [10 + shift // 2, 450]])  # of each of the first two images
    counts = torch.stack([counts, counts, *[torch.zeros_like(counts)] * 6])
    pixels = torch.stack([counts.diagonal(dim1=1, dim2=2), counts.sum(dim=2), counts.sum(dim=1)], dim=1)
    return {"prediction": predicted, "quality": torch.linspace(1, 0.3 + shift / 100, 8), "places": torch.arange(8),
            "confusion": counts, "class_pixels": pixels}  # fmt: skip


def test_a_run_of_label_maps_shows_pictures_the_worst_and_the_confusion():
    run = FinishedRun("net", {}, label_maps(4))
    beside, worst, _, confusion = label_map_run_sections(run, Maps(), CLASSES)
    assert [len(row) for row in beside.rows] == [3] * 6
    assert text_of(worst.rows[0][1]) == "truth, 7.png"
    assert text_of(worst.rows[0][2]) == "predicted: mIoU 34.0%"
    assert confusion.matrix.counts == [[1000, 10], [24, 900]]
    assert beside.swatches[-1][0] == "not counted"
    truth, predicted = (picture.image for picture in worst.rows[0][1:])
    assert truth.size == predicted.size == (360, 270), "the padding of the record is not shown"
    assert [section.title for section in label_map_run_sections(run, None, CLASSES)] == [
        "IoU of the classes", "Confusion",
    ]  # fmt: skip


def test_a_comparison_of_label_maps_has_the_iou_of_each_class():
    runs = [FinishedRun("first", {}, label_maps(4)), FinishedRun("second", {}, label_maps(0))]
    differ, ious, *confusions = label_map_comparison_sections(runs, Maps(), CLASSES)
    assert len(differ.rows[0]) == 3
    assert label_map_comparison_sections([runs[0], runs[0]], Maps(), CLASSES)[0].rows == []
    assert ious.tables[0].columns[2:] == ["first", "second"]
    assert ious.tables[0].rows[0][2] == f"{1000 / 1034:.1%}"
    assert [section.title for section in confusions] == [
        "Confusion of first, first seed", "Confusion of second, first seed",
    ]  # fmt: skip


def test_many_classes_have_no_confusion():
    records = label_maps(4)
    del records["confusion"]
    titles = [section.title for section in label_map_run_sections(FinishedRun("net", {}, records), Maps(), CLASSES)]
    assert titles == ["Predictions beside the truth", "Worst images", "IoU of the classes"]


@pytest.mark.parametrize("size", [(3, 5), (6, 2)])
def test_padding_is_removed(size):
    labels = torch.full((6, 5), 255, dtype=torch.uint8)
    labels[: size[0], : size[1]] = 1
    assert without_padding(labels).shape == size
