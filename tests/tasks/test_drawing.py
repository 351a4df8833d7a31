"""Pictures of boxes, masks and label maps: what is drawn, where, and in which colors."""

import numpy as np
import torch
from PIL import Image

from interlayer.tasks.drawing import IGNORED_COLOR, SMALLEST, class_color, draw_detections, draw_label_map

CLASSES = ["cat", "dog"]
SIDE = 512


def image(size=(SIDE, SIDE)):
    return Image.new("RGB", size, (200, 200, 200))


def found(*boxes, labels, scores=None, **more):
    values = {"boxes": torch.tensor(boxes, dtype=torch.float32).view(-1, 4), "labels": torch.tensor(labels), **more}
    return values if scores is None else {**values, "scores": torch.tensor(scores)}


def colors(picture):
    return {color for _, color in picture.getcolors(picture.width * picture.height)}


def test_a_box_is_drawn_in_the_color_of_its_class_where_it_is():
    picture = draw_detections(image(), found([100, 120, 300, 280], labels=[1], scores=[0.9]), CLASSES, legend=False)
    assert picture.size == (SIDE, SIDE)
    assert picture.getpixel((100, 200)) == class_color(1)
    assert picture.getpixel((299, 200)) in (class_color(1), (25, 25, 25))
    assert picture.getpixel((200, 200)) == (200, 200, 200)
    assert class_color(0) not in colors(picture)


def test_boxes_of_low_scores_are_left_out():
    boxes = found([20, 40, 200, 200], [250, 250, 400, 400], labels=[0, 1], scores=[0.4, 0.6])
    drawn = colors(draw_detections(image(), boxes, CLASSES, min_score=0.5))
    assert class_color(1) in drawn
    assert class_color(0) not in drawn


def test_masks_are_transparent_with_an_outline():
    mask = torch.zeros(1, SIDE, SIDE, dtype=torch.bool)
    mask[0, 150:350, 150:350] = True
    boxes = found([150, 150, 350, 350], labels=[0], scores=[0.9], masks=mask)
    picture = draw_detections(image(), boxes, CLASSES, legend=False)
    inside, color = np.array(picture.getpixel((250, 250))), np.array(class_color(0))
    assert np.abs(inside - (0.65 * 200 + 0.35 * color)).max() <= 1
    assert picture.getpixel((150, 250)) == class_color(0)
    assert picture.getpixel((450, 450)) == (200, 200, 200)


def test_small_images_are_enlarged_and_large_ones_reduced_with_their_boxes():
    enlarged = draw_detections(image((32, 24)), found([8, 8, 24, 20], labels=[0]), CLASSES, legend=False)
    assert enlarged.size == (SMALLEST, SMALLEST * 24 // 32)
    assert enlarged.getpixel((8 * 15, 14 * 15)) == class_color(0)
    reduced = draw_detections(image((2000, 1000)), found([200, 200, 1800, 800], labels=[0]), CLASSES, longest=400)
    assert reduced.width == 400
    assert reduced.height > 200, "the legend is below the image"
    assert reduced.getpixel((40, 100)) == class_color(0)


def test_boxes_at_the_edges_and_many_boxes_are_drawn():
    corners = torch.rand(300, 2) * 500 - 20
    boxes = torch.cat([corners, corners + 40], dim=1)
    everything = {"boxes": boxes, "labels": torch.arange(300) % 2, "scores": torch.rand(300)}
    assert draw_detections(image(), everything, CLASSES).width == SIDE


def test_nothing_found_gives_the_image():
    picture = draw_detections(image(), found(labels=[], scores=[]), CLASSES)
    assert colors(picture) == {(200, 200, 200)}


def test_a_label_map_has_the_colors_of_its_classes_and_a_legend():
    labels = torch.zeros(24, 32, dtype=torch.int64)
    labels[:, 16:] = 1
    labels[:4] = 255
    picture = draw_label_map(image((32, 24)), labels, CLASSES, opacity=1.0)
    assert picture.width == SMALLEST
    assert picture.height > SMALLEST * 24 // 32
    assert picture.getpixel((10, 200)) == class_color(0)
    assert picture.getpixel((470, 200)) == class_color(1)
    assert picture.getpixel((10, 10)) == IGNORED_COLOR
    bare = draw_label_map(image((32, 24)), labels, CLASSES, legend=False)
    assert bare.height == SMALLEST * 24 // 32


def test_colors_of_classes_are_stable_and_different():
    drawn = [class_color(label) for label in range(60)]
    assert len(set(drawn)) == len(drawn)
    assert drawn[0] == (40, 205, 80)
    assert all(0 <= value <= 255 for color in drawn for value in color)
