"""The model card of a stored network, in Markdown with the metadata of the Hugging Face Hub."""

from __future__ import annotations

from typing import Any

from timm.models._hub import generate_readme

from ..hosts import MECHANISMS
from ..models.build import plain_name, split_name
from ..models.rows import ROWS
from ..models.weights import first_names
from ..papers.citations import citations_of
from .trained import LoadedNetwork

SHOWN_CLASSES = 20
RECIPE_KEYS = ("data", "epochs", "batch_size", "optimizer", "lr", "weight_decay", "schedule", "pretrained", "seed")


def model_card(loaded: LoadedNetwork, architecture: str, *, name: str, license: str) -> str:
    """Returns the model card of a network: what it is, how it was trained and tested, how to load it, what to cite.

    Args:
        loaded: the network.
        architecture: the name of the network, or NAME+MECHANISM.
        name: the title of the card.
        license: the license of the weights.
    """
    mechanisms = _mechanisms(architecture)
    backbone = plain_name(architecture)
    added = f" with {', '.join(f'`{key}`' for key in mechanisms)} attached" if mechanisms else ""
    card = {
        "tags": ["image-classification", "timm", "interlayer"],
        "license": license,
        "description": f"`{architecture}`: `{backbone}`{added}, an image classifier for timm and interlayer.",
        "details": _details(loaded, mechanisms),
        "usage": _usage(architecture, name),
    }
    citations = citations_of(split_name(architecture)[0], mechanisms)
    if citations:
        card["citation"] = citations
    return str(generate_readme(card, name))


def _mechanisms(architecture: str) -> list[str]:
    name, attached = split_name(architecture)
    row = ROWS.get(name)
    own = [key for key in (row.companion, row.mechanism) if key] if row else []
    return own + [key for key, _ in attached]


def _details(loaded: LoadedNetwork, mechanisms: list[str]) -> dict[str, Any]:
    transform, classes = loaded.transform, loaded.classes if loaded.class_names else []
    parameters = sum(parameter.numel() for parameter in loaded.network.parameters())
    details: dict[str, Any] = {
        "Mechanisms": {key: MECHANISMS[key].about for key in mechanisms if key in MECHANISMS},
        "Parameters": f"{parameters:,}",
        "Images": f"{transform.size} x {transform.size}, {transform.interpolation}, crop_pct {transform.crop_pct}",
        "Normalization": f"mean {list(transform.mean)}, std {list(transform.std)}",
    }
    if classes:
        details["Classes"] = f"{len(classes)}: {first_names(classes, SHOWN_CLASSES)}"
    if loaded.summary:
        test = loaded.summary["test"]
        scores = {key: value for key, value in test.items() if isinstance(value, (int, float)) and key != "images"}
        details["Test"] = {
            "images": f"{test['images']:,}",
            **{key: f"{value:.4f}" for key, value in scores.items()},
            "weights": loaded.summary["chosen_by"],
        }
        details["Training"] = {key: getattr(loaded.recipe, key) for key in RECIPE_KEYS}
    return {key: value for key, value in details.items() if value}


def _usage(architecture: str, name: str) -> str:
    build = (
        f'interlayer.models.build_network("hf-hub:USER/{name}", pretrained=True)'
        if split_name(architecture)[1]
        else f'timm.create_model("hf-hub:USER/{name}", pretrained=True)'
    )
    return f"""```python
import interlayer  # registers the mechanisms and models
import timm

model = {build}.eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
```

On the command line: `interlayer evaluate hf-hub:USER/{name} --data FOLDER`.
"""
