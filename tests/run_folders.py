"""What two folders of runs have in common, bit for bit."""

import csv
import json

import torch

from interlayer.models.checkpoints import read_checkpoint
from interlayer.training.logs import TIMES


def weights(folder):
    return read_checkpoint(folder / "weights.safetensors")[0]


def metrics(folder):
    """The rows of metrics.csv as text, without the columns of time."""
    with open(folder / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]


def assert_same_run(first, second):
    """Bit for bit: weights, metrics, test scores."""
    ours, theirs = weights(first), weights(second)
    assert list(ours) == list(theirs)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert metrics(first) == metrics(second)
    assert (
        json.loads((first / "summary.json").read_text())["test"]
        == (json.loads((second / "summary.json").read_text())["test"])
    )
