"""The data of a run: image sources, transforms, and batches on the device."""

from .augmentation import BatchTransform
from .base import EvalBatches, TrainBatches, open_batches
from .batches import eval_batches, train_batches
from .class_names import ClassNames
from .context import LoadingContext, Ranks
from .dataset import Data
from .images import Images, Problems
from .sources import open_data, open_data_to_evaluate
from .streams import Stream
from .transforms import ImageTransform

__all__ = [
    "BatchTransform",
    "ClassNames",
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
    "open_batches",
    "open_data",
    "open_data_to_evaluate",
    "train_batches",
]
