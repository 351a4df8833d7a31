"""Chooses how the batches of a source are made.

- Images that fit on the device are kept and augmented there (resident.py).
- Other images are loaded and augmented by worker processes (workers.py).
- Shards are read sequentially (streams.py).
"""

from __future__ import annotations

import psutil
import torch

from ..files import TrainingError
from .base import EvalBatches, TrainBatches
from .context import LoadingContext
from .images import Images
from .resident import RESIDENT_BYTES, ResidentEvalBatches, ResidentImages, ResidentTrainBatches
from .streams import Stream, StreamEvalBatches, StreamTrainBatches
from .workers import LoadedEvalBatches, LoadedTrainBatches

EVAL_PIXELS = 2**20  # minimum number of pixels in an evaluation batch: 1024 images of 32 x 32


def why_not_resident(images: Images | Stream, context: LoadingContext) -> str:
    """Returns why the images cannot be kept on the device and augmented there; empty if they can."""
    recipe, size = context.recipe, context.transform.size
    if isinstance(images, Stream):
        return "they are a stream"
    if context.task.annotations != "labels":
        return "images with boxes or masks are loaded by workers"
    if recipe.crop in ("resized", "scaled"):
        return f"crop: {recipe.crop} is done by workers"
    if recipe.auto_augment or recipe.color_jitter:
        return "auto_augment and color_jitter are done by workers"
    total = len(images) * 3 * size * size
    most = _free_bytes(context.device) // 2 if recipe.resident == "yes" else RESIDENT_BYTES
    return f"they take {total / 2**30:.1f} GiB, and at most {most / 2**30:.1f} GiB are used" if total > most else ""


def _free_bytes(device: torch.device) -> int:
    """Returns the free memory of a device in bytes."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def train_batches(images: Images | Stream, context: LoadingContext) -> TrainBatches:
    """Returns the training batches of a source."""
    recipe = context.recipe
    why_not = why_not_resident(images, context)
    if recipe.resident == "yes" and why_not:
        raise TrainingError(f"resident=yes: the images cannot be kept on the device, {why_not}")
    if isinstance(images, Stream):
        return StreamTrainBatches(images, context)
    if recipe.resident != "no" and not why_not:
        return ResidentTrainBatches.of(images, context)
    return LoadedTrainBatches(images, context)


def eval_batches(images: Images | Stream, context: LoadingContext) -> EvalBatches:
    """Returns the evaluation batches of a source."""
    recipe, size = context.recipe, context.transform.size
    trained = recipe.batch_size // (context.ranks.world_size * recipe.accumulate)
    batch_size = recipe.eval_batch_size or max(1, trained, EVAL_PIXELS // size**2)
    if isinstance(images, Stream):
        return StreamEvalBatches(images, batch_size, context)
    keeps = recipe.resident != "no" and context.task.annotations == "labels"
    if keeps and len(images) * 3 * size**2 <= RESIDENT_BYTES // 4:
        return ResidentEvalBatches(ResidentImages.of(images, context), batch_size, context)
    return LoadedEvalBatches(images, batch_size, context)
