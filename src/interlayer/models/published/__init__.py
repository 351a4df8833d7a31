"""Conversion of the authors' checkpoints. Each file recognizes the checkpoints of one family and renames them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...hosts import attached_mechanisms
from ..checkpoints import CheckpointError, check_description, recorded_descriptions, unwrap
from ..weights import first_names, match_tensors
from .family import Family
from .gates import GATES
from .mobilenet_v2 import MOBILENET_V2
from .mrla import MRLA
from .pvt_v2 import PVT_V2
from .resnet import RESNET
from .rest import REST
from .rla import RLA

# Applied in this order, each to the result of the previous ones: MRLA renames its attention, and the next family that
# recognizes the result renames the backbone. RLA renames the blocks, and the next family their SE or ECA.
FAMILIES: tuple[Family, ...] = (RLA, REST, MRLA, RESNET, GATES, MOBILENET_V2, PVT_V2)


def convert_checkpoint(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Converts the state dict of a published model to the state dict of `model`.

    Wrappers such as ``{"state_dict": ...}`` and prefixes such as "module." are removed. The model is not changed.

    Args:
        state_dict: the checkpoint of the authors, as returned by ``torch.load``.
        model: the model of this library, built with ``reading="published"``.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape, or the model has another reading.

    >>> model = timm.create_model("resnet50_mrla_light", reading="published")
    >>> model.load_state_dict(interlayer.convert_checkpoint(checkpoint, model))
    """
    source = unwrap(state_dict)
    check_description(recorded_descriptions(state_dict), model)
    readings = {getattr(mechanism, "reading", None) for mechanism in attached_mechanisms(model).values()}
    renamed = source
    for family in FAMILIES:
        if not family.recognizes(renamed, model):
            continue
        if family.reading_matters and "paper" in readings:
            raise CheckpointError(
                "a published checkpoint computes the published reading, this model the paper's: build it with "
                "reading='published'"
            )
        renamed = family.rename(renamed, model)
    expected = model.state_dict()
    converted = {name: _shaped_like(expected.get(name), tensor) for name, tensor in renamed.items()}
    for name, tensor in expected.items():
        if name.endswith("num_batches_tracked"):  # absent from checkpoints of old PyTorch
            converted.setdefault(name, torch.zeros_like(tensor))
    report = match_tensors(converted, expected)
    unknown = [name for name in report.unexpected if name in source]
    report.check(
        "the checkpoint does not fit the model",
        f"; unknown: {first_names(unknown)}, which the conversion does not rename" if unknown else "",
    )
    return {name: converted[name] for name in expected}


def _shaped_like(expected: Tensor | None, tensor: Tensor) -> Tensor:
    """Adds or removes dimensions of size one: lambda is [C, 1, 1] in the checkpoint and [C] in the model."""
    if expected is not None and tensor.squeeze().shape == expected.squeeze().shape:
        return tensor.reshape(expected.shape)
    return tensor


__all__ = ["FAMILIES", "Family", "convert_checkpoint"]
