"""Stages of layers with layer attention, for tests of the mechanism without a backbone."""

import torch
from torch import nn

from interlayer.mechanisms import MLA, MRLABase, MRLALight, MRLALinear

VARIANTS = {"light": MRLALight, "base": MRLABase, "mla": MLA, "linear": MRLALinear}
STYLES = ("cnn", "transformer")


def stage(make, layers=3, channels=16, dtype=torch.float32, **options):
    options = {"channels_per_head": 4, **options}
    return nn.ModuleList(make(channels, **options) for _ in range(layers)).to(dtype)


def run_stage(layers, maps, shortcuts=None):
    """Returns the outputs of a stage with blocks that return `maps`."""
    memory, outputs = None, []
    for t, (layer, x) in enumerate(zip(layers, maps, strict=True)):
        output, memory, _ = layer(x, memory, None if shortcuts is None else shortcuts[t])
        outputs.append(output)
    return outputs
