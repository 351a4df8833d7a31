"""The names of the authors' programs for the tensors of a network of this library: the inverse of the conversion.

With them a test can convert members of a family of which there is no file.
"""

import re

import torch

from interlayer.hosts import attached_blocks, entry_of

OURS_TO_PUBLISHED = (
    (".mrla.decay", ".mrla.lambda_t"),
    (".mrla.query.", ".mrla.mrla.Wq."),
    (".mrla.key.", ".mrla.mrla.Wk."),
    (".mrla.value.", ".mrla.mrla.Wv."),
    (".mrla.norm.", ".bn_mrla."),
    (".mrla.norm_in.", ".mrla.normx."),
    (".mrla.norm_previous.", ".mrla.normo."),
)


def published_mrla(state_dict):
    """Returns the state dict of a network with MRLA by the names of the authors' program."""
    renamed = {}
    for name, tensor in state_dict.items():
        for ours, theirs in OURS_TO_PUBLISHED:
            name = name.replace(ours, theirs)
        renamed[name] = tensor
    return renamed


CELLS = {
    "convlstm": {"gates": "conv"},
    "convgru": {
        "gates": "gate_conv",
        "reset_norm": "reset_gate_norm",
        "update_norm": "update_gate_norm",
        "candidate": "output_conv",
        "candidate_norm": "output_norm",
    },
}
NOT_SHARED = {"compress": "conv_out", "recurrent": "recurrent_conv", "norms": "bn_rla"}
MOBILE_NETWORK = {
    "conv_stem": "conv1.0",
    "bn1": "conv1.1",
    "conv_head": "conv2.0",
    "bn2": "conv2.1",
    "classifier": "classifier.1",
}
EXPANDED = {
    "conv_pw": "conv1x1.0",
    "bn1": "conv1x1.1",
    "conv_dw": "conv.0.0",
    "bn2": "conv.0.1",
    "conv_pwl": "conv.1",
    "bn3": "conv.2",
    "eca_gate.attention.conv": "conv.3.conv",
}
NOT_EXPANDED = {
    "conv_dw": "conv.0.0",
    "bn1": "conv.0.1",
    "conv_pw": "conv.1",
    "bn2": "conv.2",
    "eca_gate.attention.conv": "conv.3.conv",
}


def published_gates(state_dict):
    """Returns the state dict of a ResNet with the authors' names of SE and ECA. The layers of their SE are linear."""
    renamed = {}
    for name, tensor in state_dict.items():
        gate = re.sub(r"\.(se|se_gate\.attention|eca_gate\.attention)\.(conv|fc1|fc2)\.", _gate_name, name)
        renamed[gate] = tensor.flatten(1) if ".se.fc." in gate else tensor
    return renamed


def _gate_name(found):
    return {"conv": ".eca.conv.", "fc1": ".se.fc.0.", "fc2": ".se.fc.2."}[found[2]]


def published_mobilenet(state_dict):
    """Returns the state dict of MobileNetV2 by the names of torchvision, with ECA as the last layer of a block."""
    blocks = list(dict.fromkeys(re.findall(r"blocks\.\d\.\d(?=\.conv_dw\.weight)", "\n".join(state_dict))))
    network = {"conv_stem": "features.0.0", "bn1": "features.0.1", "classifier": "classifier.1"}
    network |= {"conv_head": f"features.{len(blocks) + 1}.0", "bn2": f"features.{len(blocks) + 1}.1"}
    expanded = {"conv_pw": "0.0", "bn1": "0.1", "conv_dw": "1.0", "bn2": "1.1", "conv_pwl": "2", "bn3": "3"}
    expanded["eca_gate.attention.conv"] = "4.conv"
    renamed = {}
    for name, tensor in state_dict.items():
        module, _, kind = name.rpartition(".")
        if found := re.match(r"(blocks\.\d\.\d)\.(.+)$", module):
            simple = f"{found[1]}.conv_pwl.weight" not in state_dict
            inner = NOT_EXPANDED[found[2]].removeprefix("conv.") if simple else expanded[found[2]]
            theirs = f"features.{blocks.index(found[1]) + 1}.conv.{inner}"
        else:
            theirs = network[module]
        renamed[f"{theirs}.{kind}"] = tensor
    return renamed


def published_rla(model):
    """Returns the state dict of a network with RLA by the authors' names, with weights of blocks for [x, h]."""
    mobile = hasattr(model, "conv_head")
    places = {name: entry_of(block, "rla").place for name, block in attached_blocks(model)}
    blocks = {(place.stage, place.index): _indices(name, mobile) for name, place in places.items()}
    first_compressions = [0]
    for stage in model.rla.stages:
        first_compressions.append(first_compressions[-1] + len(stage.compress))
    published = {}
    for name, tensor in _joined(model, places, mobile).items():
        module, _, kind = name.rpartition(".")
        if found := re.match(r"(?:blocks\.|layer)\d\.\d+(?=\.)", module):
            inner = module.removeprefix(f"{found[0]}.")
            if mobile:
                inner = (EXPANDED if hasattr(model.get_submodule(found[0]), "conv_pwl") else NOT_EXPANDED)[inner]
            names = [f"stages.{_indices(found[0], mobile)}.{inner}"]
        elif found := re.match(r"rla\.stages\.(\d)\.(\w+)\.(\d+)\.?(.*)$", module):
            stage, what, index = int(found[1]), found[2], int(found[3])
            if not model.rla.stages[stage].shared:
                names = [f"stages.{blocks[stage, index]}.{NOT_SHARED[what]}"]
            elif what == "compress":
                names = [f"conv_outs.{first_compressions[stage] + index}"]
            elif what == "recurrent":
                names = [f"recurrent_convs.{stage}" + (f".{CELLS[model.rla.cell][found[4]]}" if found[4] else "")]
            else:
                names = [f"stage_bns.{blocks[stage, index]}"]
        elif module == "rla.recurrent":
            depthwise = model.rla.recurrent.groups > 1
            names = [f"recurrent_{'ds' if depthwise else ''}convs.{stage}" for stage in range(5)]
        elif module == "rla.norm":
            names = ["bn2"]
        else:
            names = [MOBILE_NETWORK[module] if mobile else module]
        published |= {f"{theirs}.{kind}": tensor for theirs in names}
    return published_gates(published)


def _indices(name, mobile):
    """The numbers of stage and block in the authors' names, which count stages from zero."""
    stage, block = re.findall(r"\d+", name)
    return f"{int(stage) - (0 if mobile else 1)}.{block}"


def _joined(model, places, mobile):
    """The state dict of a model, in which the slices for x and h of a convolution or norm are one tensor."""
    state = dict(model.state_dict())
    targets = {"rla.join": ("conv_head", 1)}
    for name, place in places.items():
        exchange = f"rla.stages.{place.stage}.exchanges.{place.index}"
        expanded = f"{name}.conv_pwl.weight" in state
        if mobile:
            targets[f"{exchange}.0"] = (f"{name}.conv_dw", 0)
            targets[f"{exchange}.1"] = (f"{name}.{'bn2' if expanded else 'bn1'}", 0)
            targets[f"{exchange}.3"] = (f"{name}.{'conv_pwl' if expanded else 'conv_pw'}", 1)
        else:
            targets[exchange] = (f"{name}.conv1", 1)
    for name in list(state):
        module, _, kind = name.rpartition(".")
        if module in targets:
            other, (target, dim) = state.pop(name), targets[module]
            if other.dim():
                state[f"{target}.{kind}"] = torch.cat((state[f"{target}.{kind}"], other), dim)
    return state
