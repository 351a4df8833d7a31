"""Epochs with a number of steps of their own run over the same batches as passes over the images."""

import itertools

import pytest
import torch

from interlayer.training.processes import init_processes
from interlayer.training.setup import set_up


def batches(recipe, epochs, start=0):
    """The training batches of some epochs, as one list; the first epoch is entered at a step."""
    setup = set_up(recipe, init_processes(recipe), None)
    first = setup.batches.epoch(0, start)
    rest = (setup.batches.epoch(epoch) for epoch in range(1, epochs))
    return setup.batches, [_pixels(batch) for batch in itertools.chain(first, *rest)]


def _pixels(batch):
    return batch if isinstance(batch, torch.Tensor) else batch[0]


@pytest.mark.parametrize("resident", ["auto", "no"])
def test_epochs_of_other_lengths_have_the_batches_of_passes(small, digit_files, resident):
    recipe = small(data=str(digit_files), batch_size=40, crop="none", flip=0.5, workers=0, resident=resident)
    passes, expected = batches(recipe, 4)
    assert passes.steps == passes.pass_steps == 3
    ours, found = batches(recipe.replace(epoch_steps=4), 3)
    assert ours.steps == 4
    assert len(found) == len(expected) == 12
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    _, resumed = batches(recipe.replace(epoch_steps=4), 1, start=2)
    assert all(torch.equal(a, b) for a, b in zip(resumed, expected[2:4], strict=True))
    assert ours.names(1, 0) == passes.names(1, 1)
