"""timm's reader of WebDataset shards, extended to report the samples that it cannot decode.

timm's reader logs such samples and continues. The subclass builds the same pipeline, in the same order, with its own
decoding stage and error handler.
"""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Iterator
from typing import Any

import webdataset
from PIL import Image
from timm.data.readers.reader_wds import ReaderWds, detshuffle2

from .images import Unusable, label_outside, open_rgb, unreadable


class ReportingReader(ReaderWds):
    """Reads WebDataset shards and collects the samples that cannot be used.

    Args:
        stream_name: the name of the stream in `failures`.
        classes: the number of classes. Samples with a label outside it are failures.
        options: passed to timm's `ReaderWds`.

    Attributes:
        failures: samples and shards that could not be read since the list was last cleared.
    """

    def __init__(self, *, stream_name: str, classes: int, **options: Any) -> None:
        super().__init__(**options)
        self.stream_name, self.classes = stream_name, classes
        self.failures: list[Unusable] = []

    def __iter__(self) -> Iterator[tuple[Image.Image, int]]:
        self.ds = None  # rebuilt for each pass, so that shuffling starts from the seed
        self.failures.clear()
        return super().__iter__()

    def _lazy_init(self) -> None:
        super()._lazy_init()  # determines the index of this worker
        shards = [os.path.join(self.root, name) for name in self.split_info.filenames]
        stages: list[Any] = [webdataset.SimpleShardList(shards)]
        if self.is_training:
            stages.append(detshuffle2(self.shard_shuffle_size, seed=self.common_seed, epoch=self.epoch_count))
        stages += [self._split_by_node_and_worker, webdataset.tarfile_to_samples(handler=self._note_shard)]
        if self.is_training:
            rng = random.Random(self.worker_seed)
            sizes = {"bufsize": self.sample_shuffle_size, "initial": self.sample_initial_size}
            stages.append(webdataset.shuffle(**sizes, rng=rng))
        self.ds = webdataset.DataPipeline(*stages, self._decode_samples)

    def _decode_samples(self, samples: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Decodes samples. Records those that fail and skips those without a label. This is the last pipeline stage."""
        for sample in samples:
            name = f"{sample.get('__url__', '')}:{sample.get('__key__', '')}"
            try:
                label = self._label(sample)
                if label is None:
                    continue
                image = self._image(sample)
            except Exception as error:
                self.failures.append(Unusable(name, unreadable(error)))
                continue
            if not 0 <= label < self.classes:
                self.failures.append(Unusable(name, label_outside(label, self.classes)))
                continue
            yield {"image": image, "target": label, "__key__": sample.get("__key__")}

    def _label(self, sample: dict[str, Any]) -> int | None:
        """Returns the label; None if the alternative labels of the shards exclude the sample."""
        if not self.split_info.alt_label:
            return int(sample[self.target_key])
        label = int(json.loads(sample["json"])[self.split_info.alt_label])
        return label if label >= 0 else None

    def _image(self, sample: dict[str, Any]) -> Image.Image:
        key = next((key for key in self.input_key.split(";") if key in sample), None)
        if key is None:
            raise ValueError(f"it has no entry {self.input_key.replace(';', ', ')}")
        return open_rgb(io.BytesIO(sample[key]))

    def _note_shard(self, error: Exception) -> bool:
        """Records a shard that cannot be read. Returning True continues with the next shard."""
        self.failures.append(Unusable(f"a shard of {self.stream_name} ({error})", unreadable(error)))
        return True
