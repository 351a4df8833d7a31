"""Names and shapes in the published RLA checkpoints.

In the checkpoints, the first convolution of a block has one weight for the concatenation [x, h], and the norms and
convolutions of the state h are separate from the stages. In this library, the slice of the weight for h belongs to the
mechanism (`rla.stages.0.exchanges.1`), and the weights of the block have the shapes of a plain backbone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ...hosts import attached_blocks, entry_of
from ..checkpoints import CheckpointError
from .family import Family, Tensors

STATE = r"^(conv_outs|recurrent_convs|recurrent_dsconvs|stage_bns)\.|\.(conv_out|recurrent_conv|bn_rla)\."

# Names in a block of MobileNetV2, with and without an expansion: in the checkpoint, and in this library.
INVERTED = {
    "conv1x1.0": "conv_pw",
    "conv1x1.1": "bn1",
    "conv.0.0": "conv_dw",
    "conv.0.1": "bn2",
    "conv.1": "conv_pwl",
    "conv.2": "bn3",
    "conv.3": "eca_gate.attention",
    "eca": "eca_gate.attention",
}
NOT_EXPANDED = {
    **{key: value for key, value in INVERTED.items() if "eca" in value},
    "conv.0.0": "conv_dw",
    "conv.0.1": "bn1",
    "conv.1": "conv_pw",
    "conv.2": "bn2",
}
# Weights with a slice for the state: the name of the slice in this library, and the dimension of the concatenation.
STATE_SLICES_RESNET = {"conv1": ("", 1)}
STATE_SLICES_INVERTED = {"conv.0.0": ("0.", 0), "conv.0.1": ("1.", 0), "conv.1": ("3.", 1)}
CELLS = {  # names in ConvLSTM and ConvGRU
    "conv": "gates",
    "gate_conv": "gates",
    "reset_gate_norm": "reset_norm",
    "update_gate_norm": "update_norm",
    "output_conv": "candidate",
    "output_norm": "candidate_norm",
}

SHARED_RECURRENCE = "rla.recurrent"  # one convolution under five names in the checkpoint: the last one loaded is kept


def recognizes(tensors: Tensors, model: nn.Module) -> bool:
    return any(re.search(STATE, name) for name in tensors)


def rename(tensors: Tensors, model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors by the names of `model`. Weights for [x, h] are split in two.

    Unknown tensors keep their names.
    """
    rla: Any = getattr(model, "rla", None)
    if rla is None:
        return dict(tensors)
    _check_state_channels(tensors, rla.state_channels)
    entries = {name: entry_of(block, "rla") for name, block in attached_blocks(model)}
    places = {name: entry.place for name, entry in entries.items() if entry is not None}
    mobile = any(name.startswith("blocks.") for name in places)
    names = set(model.state_dict())

    def block_of(stage: int, index: int) -> str:
        return f"blocks.{stage}.{index}" if mobile else f"layer{stage + 1}.{index}"

    compressions = [  # the checkpoint numbers them by stage and width
        f"rla.stages.{s}.compress.{w}" for s, stage in enumerate(rla.stages) for w in range(len(stage.compress))
    ]
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if found := re.match(r"stages\.(\d+)\.(\d+)\.(.+)$", module):
            block = block_of(int(found[1]), int(found[2]))
            prefixes: Mapping[str, str] = {}  # those of SE and ECA in a ResNet are renamed by the next family
            if mobile:
                prefixes = INVERTED if f"{block}.conv_pwl.weight" in names else NOT_EXPANDED
            result |= _rename_in_block(rla, block, places.get(block), found[3], kind, tensor, prefixes, mobile)
        elif found := re.match(r"conv_outs\.(\d+)$", module):
            result[f"{_at(compressions, int(found[1]), module)}.{kind}"] = tensor
        elif found := re.match(r"stage_bns\.(\d+)\.(\d+)$", module):
            place = places.get(block_of(int(found[1]), int(found[2])))
            norm = module if place is None else f"rla.stages.{place.stage}.norms.{place.index}"
            result[f"{norm}.{kind}"] = tensor
        elif found := re.match(r"recurrent_convs\.(\d+)(?:\.(\w+))?$", module):
            cell = f".{CELLS.get(found[2], found[2])}" if found[2] else ""
            recurrence = f"rla.stages.{found[1]}.recurrent.0" if rla.recurrent is None else SHARED_RECURRENCE
            result[f"{recurrence}{cell}.{kind}"] = tensor
        elif re.match(r"recurrent_dsconvs\.\d+$", module):
            result[f"{SHARED_RECURRENCE}.{kind}"] = tensor
        else:
            result |= _rename_in_network(rla, module, kind, tensor, mobile)
    return result


def _check_state_channels(tensors: Tensors, expected: int) -> None:
    found = next((len(tensor) for name, tensor in tensors.items() if re.search(r"conv_outs?\.", name)), expected)
    if found != expected:
        raise CheckpointError(
            f"the state of the checkpoint has {found} channels, that of this model {expected}: build it with "
            f"state_channels={found}"
        )


def _rename_in_block(
    rla: Any,
    block: str,
    place: Any,
    inner: str,
    kind: str,
    tensor: Tensor,
    prefixes: Mapping[str, str],
    mobile: bool,
) -> dict[str, Tensor]:
    if inner in ("conv_out", "recurrent_conv", "bn_rla") and place is not None:  # not shared
        ours = {"conv_out": "compress", "recurrent_conv": "recurrent", "bn_rla": "norms"}[inner]
        return {f"rla.stages.{place.stage}.{ours}.{place.index}.{kind}": tensor}
    known = next((prefix for prefix in sorted(prefixes, key=len, reverse=True) if _is_under(inner, prefix)), None)
    renamed = inner if known is None else prefixes[known] + inner.removeprefix(known)
    state_slice = (STATE_SLICES_INVERTED if mobile else STATE_SLICES_RESNET).get(inner)
    if state_slice is None or place is None or not rla.exchange or tensor.dim() == 0:
        result = {f"{block}.{renamed}.{kind}": tensor}
        if state_slice is not None and place is not None and rla.exchange:  # num_batches_tracked of both norms
            result[f"rla.stages.{place.stage}.exchanges.{place.index}.{state_slice[0]}{kind}"] = tensor
        return result
    submodule, dim = state_slice
    own = tensor.shape[dim] - rla.state_channels
    path = f"rla.stages.{place.stage}.exchanges.{place.index}.{submodule}{kind}"
    return {
        f"{block}.{renamed}.{kind}": tensor.narrow(dim, 0, own),
        path: tensor.narrow(dim, own, rla.state_channels),
    }


def _rename_in_network(rla: Any, module: str, kind: str, tensor: Tensor, mobile: bool) -> dict[str, Tensor]:
    if module == "bn2":
        return {f"rla.norm.{kind}": tensor}
    if not mobile:
        return {f"{module}.{kind}": tensor}
    if module == "conv2.0" and rla.join is not None:
        own = tensor.shape[1] - rla.state_channels
        return {"conv_head.weight": tensor[:, :own], "rla.join.weight": tensor[:, own:]}
    names = {"conv1.0": "conv_stem", "conv1.1": "bn1", "conv2.1": "bn2", "classifier.1": "classifier"}
    return {f"{names.get(module, module)}.{kind}": tensor}


def _is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _at(names: list[str], index: int, otherwise: str) -> str:
    return names[index] if index < len(names) else otherwise


RLA = Family("RLA", recognizes, rename, reading_matters=True)
