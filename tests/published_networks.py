"""Reads the names, shapes and logits of the published networks in tests/reference."""

import gzip
import importlib.util
import json

import numpy as np
import torch

PUBLISHED = {
    "mrla_resnet50_light": "resnet50_mrla_light",
    "mrla_resnet50_base": "resnet50_mrla_base",
    "mrla_deit_tiny_light": "deit_tiny_mrla_light",
    "mrla_deit_tiny_base": "deit_tiny_mrla_base",
    "rla_resnet50": "resnet50_rla",
    "rlav1p_resnet50": "resnet50_rla_postact",
    "rlav3_resnet50": "resnet50_rla_v3",
    "rlaus_resnet50": "resnet50_rla_unshared",
    "rlalstm_resnet50": "resnet50_rla_convlstm",
    "rlagru_resnet50": "resnet50_rla_convgru",
    "dsrla_mobilenetv2_k32": "mobilenetv2_rla",
    "dsrla_mobilenetv2_k32_eca": "mobilenetv2_eca_rla",
    "resnet50_eca": "resnet50_eca",
    "resnet50_se": "resnet50_se",
    "rest_lite": "rest_lite",
    "rest_base": "rest_base",
}
ONE_READING = ("resnet50_eca", "resnet50_se", "rest_lite", "rest_base")


def described(folder, fixture):
    """The names and shapes of a published network, its number of parameters and the shape of its input."""
    plain = folder / f"{fixture}.json"
    return json.loads(
        plain.read_text() if plain.is_file() else gzip.decompress((folder / f"{fixture}.json.gz").read_bytes())
    )


def filling(folder):
    """The functions that give a published network its weights and its input."""
    spec = importlib.util.spec_from_file_location("fill", folder / "fill.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weights(folder, fixture):
    """The state dict of a published network, a function of its names and shapes."""
    fill = filling(folder).reference_tensor
    return {name: torch.as_tensor(fill(name, tuple(shape))) for name, shape in described(folder, fixture)["state"]}


def difference(model, folder, fixture):
    """The largest difference between the logits of a network and the published ones, relative to the largest logit."""
    with np.load(folder / f"{fixture}.npz") as file:
        expected = torch.as_tensor(file["logits"])
    shape = tuple(described(folder, fixture)["input_shape"])
    with torch.no_grad():
        logits = model(torch.as_tensor(filling(folder).reference_input(shape)))
    return float((logits - expected).abs().max() / expected.abs().max())


def options(name):
    return {} if name in ONE_READING else {"reading": "published"}
