"""Hugging Face datasets, read through timm's reader."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from ..files import TrainingError
from .images import Images, open_rgb


class HuggingFaceImages(Images):
    """One split of a Hugging Face dataset.

    Args:
        name: name of the dataset, or a folder.
        split: name of the split.
        options: passed to timm's `ReaderHfds`.
    """

    def __init__(self, name: str, split: str, options: dict[str, Any]) -> None:
        try:
            from timm.data.readers.reader_hfds import ReaderHfds
        except ImportError as error:
            raise TrainingError(f"hfds/{name} needs Hugging Face datasets: pip install datasets") from error
        try:
            self.reader = ReaderHfds(name, split=split, **options)
        except Exception as error:
            raise TrainingError(
                f"hfds/{name}, split {split!r}, cannot be opened: {' '.join(str(error).split())}"
            ) from error
        self.what = f"hfds/{name} {split}"
        labels = np.array(self.reader.dataset[self.reader.label_key], dtype=np.int64)
        names = sorted(self.reader.class_to_idx, key=self.reader.class_to_idx.__getitem__)
        super().__init__(labels, names or [str(i) for i in range(int(labels.max()) + 1)])

    def name(self, index: int) -> str:
        path = self.reader._filename(index)
        return f"{self.what} image {index}" + (f" ({path})" if path else "")

    def open(self, index: int) -> Image.Image:
        file, _ = self.reader[index]
        with file:
            return open_rgb(file if isinstance(file, io.BytesIO) else io.BytesIO(file.read()))
