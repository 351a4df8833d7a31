"""Messages for a GPU that runs out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .files import TrainingError
from .recipe import Recipe


@contextmanager
def explaining_out_of_memory(recipe: Recipe) -> Iterator[None]:
    """Turns an out-of-memory error inside the ``with`` block into a `TrainingError` that names the keys to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"the GPU's memory is too small for batch_size={recipe.batch_size}: {smaller_batch_advice(recipe)}; if it "
            f"was evaluating, set eval_batch_size; if it was loading, resident=no"
        ) from error


def smaller_batch_advice(recipe: Recipe) -> str:
    """Returns which keys of the recipe reduce the memory of a training step."""
    return f"set accumulate={recipe.accumulate * 2} (the same training in smaller splits) or lower batch_size"
