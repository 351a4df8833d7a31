"""Where timm's pretrained weights are, and whether they can be loaded, checked before timm tries.

timm downloads weights from the Hugging Face Hub, whose client repeats a request for most of a minute if there is no
network, even for weights in its cache. One request with a short timeout tells beforehand. Weights in an installed
package (`packaged.py`) are used without asking.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import timm

from .errors import ModelError
from .packaged import has_package, packaged_weights
from .rows import ROWS

TIMEOUT = 5.0  # seconds for one request
WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")  # names that timm looks for, in this order


def pretrained_error(name: str, why: str) -> ModelError:
    """Returns the error of weights that cannot be downloaded."""
    return ModelError(
        f"pretrained=true: the weights of {name} cannot be downloaded ({why}); give a file of them, weights=FILE"
    )


def find_pretrained(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns further options of `timm.create_model` with which it loads pretrained weights without waiting.

    Raises a ModelError if there are no pretrained weights of the model, or if they can neither be found in a package or
    in the Hub's cache nor downloaded.

    Args:
        name: timm's name of the model.
        options: options of `timm.create_model`, which may name another source of the weights.
    """
    if ":" in name or {"pretrained_cfg", "pretrained_cfg_overlay"} & set(options):
        return {}
    config = timm.models.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        row = ROWS.get(name)
        attached = "+".join(filter(None, (row.backbone, row.companion, row.mechanism))) if row else ""
        backbone = f", or start from those of its backbone, {attached}" if attached else ""
        raise ModelError(
            f"pretrained=true: there are no pretrained weights of {name}; give a file, weights=FILE{backbone}"
        )
    if has_package(name):
        return {"pretrained_cfg_overlay": {"state_dict": packaged_weights(name)}}
    if not config.hf_hub_id or config.file:
        return {}
    why = unreachable_reason()
    cached = _cached_file(config.hf_hub_id, config.hf_hub_filename) if why else ""
    if why and not cached:
        raise pretrained_error(name, why)
    return {"pretrained_cfg_overlay": {"file": cached}} if cached else {}


def _cached_file(repository: str, filename: str | None) -> str:
    """Returns the path of a repository's weights in the cache of the Hub; an empty string if they are not there."""
    from huggingface_hub import try_to_load_from_cache

    found = (try_to_load_from_cache(repository, name) for name in ((filename,) if filename else WEIGHTS_FILES))
    return next((path for path in found if isinstance(path, str)), "")


def unreachable_reason() -> str:
    """Returns why the Hugging Face Hub cannot be reached; an empty string if it can."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE={os.environ.get('HF_HUB_OFFLINE', '1')} is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception as error:  # the client is requests or httpx, depending on the version
        return f"{constants.ENDPOINT} cannot be reached: {' '.join(str(error).split())[:120] or type(error).__name__}"
    return ""
