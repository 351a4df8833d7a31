"""Real images in small numbers, and a small recipe that trains on them in seconds."""

from pathlib import Path

import pytest
from digit_images import SMALL, save_digits

from interlayer.training.recipe import Recipe, from_values


@pytest.fixture
def small():
    """A function that makes a small recipe with some values changed."""

    def make(**changes) -> Recipe:
        return from_values({**SMALL, **changes})

    return make


@pytest.fixture(scope="session")
def digit_files(tmp_path_factory) -> Path:
    """An image folder: train with 12 images a class, val with 4."""
    root = tmp_path_factory.mktemp("digits")
    save_digits(root / "train", 12)
    save_digits(root / "val", 4, skip=12)
    return root
