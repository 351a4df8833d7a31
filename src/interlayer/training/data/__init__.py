"""The data of a run: image sources, transforms, and batches on the device."""

from .augmentation import BatchTransform
from .base import EvalBatches, TrainBatches
from .batches import eval_batches, train_batches
from .context import LoadingContext, Ranks
from .images import Images, Problems
from .sources import Data, open_data
from .streams import Stream
from .transforms import ImageTransform

__all__ = [
    "BatchTransform",
    "Data",
    "EvalBatches",
    "ImageTransform",
    "Images",
    "LoadingContext",
    "Problems",
    "Ranks",
    "Stream",
    "TrainBatches",
    "eval_batches",
    "open_data",
    "train_batches",
]
