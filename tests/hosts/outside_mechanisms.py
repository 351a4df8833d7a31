"""Two kinds of mechanisms outside the package, which use only its protocol.

WeightedSum   a block's input is a learned weighted sum of all earlier outputs of its stage
TwoStreams    two residual streams, mixed before and after every block
"""

import torch
from torch import nn

from interlayer.hosts import Mechanism, find_stages, kind_in_blocks, place_in_stage, register_mechanism
from interlayer.mechanisms import BlockMechanism
from interlayer.mechanisms.options import NoOptions


class WeightedSum(BlockMechanism):
    def __init__(self, earlier):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(earlier))
        if earlier:
            nn.init.ones_(self.weights[-1:])  # at first the last output alone: the identity

    def enter(self, x, memory, place):
        if place.index == 0:
            return x, ()
        outputs = (*memory, x)  # x is what the block before returned
        return sum(weight * output for weight, output in zip(self.weights, outputs, strict=True)), outputs


class TwoStreams(BlockMechanism):
    def __init__(self, index):
        super().__init__()
        self.before = nn.Parameter(torch.tensor([1.0, 0.0])) if index else None
        self.after = nn.Parameter(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))  # [to, from]: body, other stream

    def enter(self, x, memory, place):
        return (x if memory is None else self.before[0] * x + self.before[1] * memory), memory

    def leave(self, output, values, memory, place):
        other = values.output if memory is None else memory
        first, second = (row[0] * output + row[1] * other for row in self.after)
        return (first + 0 * second if place.last else first), second


def register(name, make):
    def place(model, options, *, image_size=None):
        for number, stage in enumerate(find_stages(model, image_size=image_size)):
            place_in_stage(model, name, number, stage, [make(index) for index in range(len(stage.blocks))])

    about = make.__doc__ or "a mechanism of a test"
    register_mechanism(name, Mechanism(kind_in_blocks(name.replace("_", " "), name), NoOptions, place, about))


register("weighted_sum", WeightedSum)
register("two_streams", TwoStreams)
