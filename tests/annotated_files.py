"""Small annotated datasets that tests write: two images with three objects of two classes."""

import json

import numpy as np
from PIL import Image

WIDE, TALL = (40, 30), (20, 36)  # width and height


def write_image(path, size, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def rle_of(mask):
    """Uncompressed run lengths of a mask [H, W]."""
    flat = mask.T.ravel().astype(int)
    edges = np.flatnonzero(np.diff(flat)) + 1
    counts = np.diff([0, *edges.tolist(), flat.size]).tolist()
    return {"size": list(mask.shape), "counts": [0, *counts] if flat[0] else counts}


def box_mask(size, box):
    mask = np.zeros((size[1], size[0]), dtype=bool)
    x, y, width, height = box
    mask[y : y + height, x : x + width] = True
    return mask


def coco_content():
    return {
        "images": [
            {"id": 7, "file_name": "wide.png", "width": 40, "height": 30},
            {"id": 9, "file_name": "tall.png", "width": 20, "height": 36},
        ],
        "categories": [{"id": 3, "name": "dog"}, {"id": 1, "name": "cat"}],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 3, "bbox": [5, 6, 10, 8], "area": 80, "iscrowd": 0,
             "segmentation": [[5, 6, 15, 6, 15, 14, 5, 14]]},
            {"id": 2, "image_id": 7, "category_id": 1, "bbox": [20, 10, 20, 20], "area": 400, "iscrowd": 0,
             "segmentation": rle_of(box_mask(WIDE, [20, 10, 20, 20]))},
            {"id": 3, "image_id": 9, "category_id": 1, "bbox": [0, 0, 4, 36], "area": 144, "iscrowd": 0,
             "segmentation": rle_of(box_mask(TALL, [0, 0, 4, 36]))},
        ],
    }  # fmt: skip


def write_coco(root, content):
    write_image(root / "images" / "wide.png", WIDE)
    write_image(root / "images" / "tall.png", TALL, 1)
    (root / "train.json").write_text(json.dumps(content))
    return root / "train.json"


def voc_object(name, box, difficult=0):
    edges = "".join(f"<{e}>{v}</{e}>" for e, v in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))
    return f"<object><name>{name}</name><difficult>{difficult}</difficult><bndbox>{edges}</bndbox></object>"


def write_voc(root, objects_by_image, lines=None):
    for index, (name, objects) in enumerate(objects_by_image.items()):
        write_image(root / "JPEGImages" / f"{name}.png", WIDE, index)
        (root / "Annotations").mkdir(exist_ok=True)
        (root / "Annotations" / f"{name}.xml").write_text(f"<annotation>{''.join(objects)}</annotation>")
    listed = root / "ImageSets" / "Main" / "train.txt"
    listed.parent.mkdir(parents=True)
    listed.write_text("\n".join(lines if lines is not None else objects_by_image))
    return root


def write_png(path, numbers):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(numbers, dtype=np.uint8)).save(path)
