"""Real images for tests: scikit-learn's digits as files, and a recipe that trains on them in seconds."""

from pathlib import Path

import numpy as np
from PIL import Image

SMALL = {
    "model": "preresnet20_cifar",
    "model_options": {"blocks": 1, "widths": [8, 8, 16]},
    "data": "digits",
    "image_size": 8,
    "crop": "padded",
    "padding": 1,
    "flip": 0.0,
    "batch_size": 256,
    "epochs": 2,
    "lr": 0.05,
    "tensorboard": False,
    "device": "cpu",
    "workers": 0,
}


def save_digits(folder: Path, images_per_class: int, skip: int = 0, size: int = 40) -> None:
    """Some of scikit-learn's digits as PNG files, in a folder for each class."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for label in range(10):
        (folder / str(label)).mkdir(parents=True)
        chosen = np.flatnonzero(digits.target == label)[skip : skip + images_per_class]
        for index in chosen:
            image = Image.fromarray((digits.images[index] * (255 / 16)).astype(np.uint8)).resize((size, size))
            image.save(folder / str(label) / f"{index}.png")
