"""Small datasets of colored rectangles with boxes, masks or label maps, and recipes that train on them in seconds."""

import json

import numpy as np
from annotated_files import box_mask, rle_of
from PIL import Image

from interlayer.training import load_recipe

COLORS = {"red": (220, 40, 40), "blue": (40, 60, 220)}
SIZES = [(64, 48), (48, 64)]  # width and height
HEAD = {  # small enough for a CPU
    "pyramid_channels": 16, "box_batch_size_per_image": 16,
    "rpn_pre_nms_top_n_train": 64, "rpn_post_nms_top_n_train": 32,
    "rpn_pre_nms_top_n_test": 64, "rpn_post_nms_top_n_test": 32,
    "box_detections_per_img": 8, "anchor_sizes": [8, 16, 32, 64, 128],
}  # fmt: skip


def draw(index, split):
    """An image with one or two rectangles: its pixels, and (class, x, y, width, height) of each."""
    draws = np.random.default_rng([index, len(split)])
    width, height = SIZES[index % 2]
    pixels = draws.integers(90, 130, (height, width, 3)).astype(np.uint8)
    objects = []
    for place in range(1 + index % 2):
        color = list(COLORS)[int(draws.integers(2))]
        w, h = (int(side) for side in draws.integers(12, 20, 2))
        x, y = int(draws.integers(0, width // 2 - 10)) + place * width // 2, int(draws.integers(0, height - h))
        w = min(w, width - x)
        pixels[y : y + h, x : x + w] = COLORS[color]
        objects.append((color, x, y, w, h))
    return pixels, objects


def write_objects(root, counts=(("train", 8), ("val", 4), ("test", 4))):
    """COCO files with boxes and masks."""
    (root / "images").mkdir(parents=True)
    for split, count in counts:
        images, annotations = [], []
        for index in range(count):
            pixels, objects = draw(index, split)
            height, width = pixels.shape[:2]
            Image.fromarray(pixels).save(root / "images" / f"{split}{index}.png")
            images.append({"id": index, "file_name": f"{split}{index}.png", "width": width, "height": height})
            for color, *box in objects:
                annotations.append({
                    "id": len(annotations) + 1, "image_id": index, "category_id": list(COLORS).index(color) + 1,
                    "bbox": box, "area": box[2] * box[3], "iscrowd": 0,
                    "segmentation": rle_of(box_mask((width, height), box)),
                })  # fmt: skip
        categories = [{"id": label, "name": name} for label, name in enumerate(COLORS, start=1)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (root / f"{split}.json").write_text(json.dumps(content))
    return root


def write_label_maps(root, counts=(("train", 8), ("val", 4), ("test", 4))):
    """Images and PNGs in which 0 is the background, 1 red, 2 blue and 9 the ignored border."""
    for split, count in counts:
        for folder in ("images", "masks"):
            (root / folder / split).mkdir(parents=True)
        for index in range(count):
            pixels, objects = draw(index, split)
            labels = np.zeros(pixels.shape[:2], dtype=np.uint8)
            for color, x, y, w, h in objects:
                labels[y : y + h, x : x + w] = list(COLORS).index(color) + 1
            labels[0] = 9
            Image.fromarray(pixels).save(root / "images" / split / f"{index}.png")
            Image.fromarray(labels).save(root / "masks" / split / f"{index}.png")
    return root


def small_recipe(task, root, **changes):
    """A recipe that trains a small network of the task for one epoch of two steps."""
    values = {
        "task": task, "data": str(root), "model": "resnet10t", "pretrained": False, "batch_size": 4, "epochs": 1,
        "workers": 0, "tensorboard": False, "device": "cpu", "precision": "float32", "channels_last": False,
        "shorter_side": [48, 48], "eval_shorter_side": None, "crop": "none", "image_size": None, "warmup_steps": 0,
        "frozen_norms": "none", "new_lr_scale": 1, "mechanism_lr_scale": None, "color_jitter": 0.1,
        "eval_batch_size": 2,
    }  # fmt: skip
    if task == "segment":
        values |= {"segmenter": "fpn", "head_options": {"channels": 16}, "data_options": {"classes": 3, "ignore": 9}}
    else:
        values |= {"head_options": HEAD}
    name = "finetune_segmentation" if task == "segment" else "finetune_detection"
    return load_recipe(name).replace(**values | changes)
