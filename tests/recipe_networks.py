"""Networks as a recipe describes them."""

import dataclasses

from torch import nn

from interlayer.tasks import make_task
from interlayer.training import Recipe, setup


def build_network(recipe: Recipe, classes: int) -> nn.Module:
    """The network that a run of the recipe would train on data of this many classes."""
    task = make_task(dataclasses.asdict(recipe), [str(label) for label in range(classes)])
    return setup.build_network(task)
