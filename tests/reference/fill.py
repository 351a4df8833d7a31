"""Deterministic weights and inputs for the reference fixtures.

A fixture lists the parameter and buffer names and shapes of a paper's own published model and the
logits that model gives, in float64 and eval mode, for weights and an input made by the two functions
below. Loading the same weights here, through this project's checkpoint conversion, must give the
same logits. Only NumPy is needed.
"""

import zlib

import numpy as np


def reference_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The value of the state-dict entry `name`, a function of its name and shape alone."""
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, dtype=np.int64)
    if name.endswith("running_var"):
        return rng.uniform(0.5, 1.5, shape)
    if name.endswith(("running_mean", "bias")):
        return 0.1 * rng.standard_normal(shape)
    if name.endswith("weight") and len(shape) == 1:  # the scale of a norm
        return 1.0 + 0.1 * rng.standard_normal(shape)
    if len(shape) > 1 and name.endswith("weight"):
        return rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
    return 0.5 * rng.standard_normal(shape)  # tokens, position embeddings, lambdas


def reference_input(shape: tuple[int, ...] = (2, 3, 224, 224)) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(0)).standard_normal(shape)
